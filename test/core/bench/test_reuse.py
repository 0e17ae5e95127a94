# SPDX-License-Identifier: Apache-2.0
"""bench/reuse: its own way is the policy's, all of the tokens or neurons is dense, and each other way is another."""

import importlib
from pathlib import Path

import pytest
import torch

from rmuscle_core.engine.plan import CallPlan
from rmuscle_core.ffn import ContextFFN, DenseFFN
from rmuscle_core.library.recording import RecordedEpisode, write_recording

JOINT_NAMES = [f'joint{j}' for j in range(5)]


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / 'bench/reuse')
    names = 'calls', 'tokens', 'neurons'
    yield tuple(importlib.import_module(name) for name in names)
    for name in names:
        monkeypatch.delitem(importlib.sys.modules, name)


@pytest.fixture
def bench(modules, tiny_checkpoint, look, tmp_path):
    episodes = [RecordedEpisode(f'run-{n}', True, [look(3 * n + place, place) for place in range(3)]) for n in range(6)]
    write_recording(tmp_path / 'recording.h5', episodes, JOINT_NAMES)
    made = modules[0].Bench(tiny_checkpoint, tmp_path / 'recording.h5')
    yield made
    made.policy.close()


@torch.inference_mode()
def test_choosing_a_fixed_number_is_what_the_policy_does(bench, modules):
    _, tokens, _ = modules
    call = next(bench.calls())
    assert {r.id.episode for r in call.references[:2]} <= {f'run-{n}' for n in range(4)}  # of the library
    assert call.references[2].id.episode == 'run-4'  # the call before
    for slot, reference in enumerate(call.references):
        bench.expand(reference, slot, CallPlan())
    arena = bench.engine.arena
    arena.point_to(0, (1, 2))
    ours = bench.error(call, ContextFFN(arena, 5), DenseFFN())
    assert 0 < ours == pytest.approx(bench.error(call, tokens.Nearest(arena, 5), DenseFFN()), rel=1e-4)
    assert bench.error(call, tokens.Nearest(arena, arena.shape.tokens), DenseFFN()) < 1e-6


@torch.inference_mode()
def test_a_threshold_takes_what_changed_more_and_at_most_half(bench, modules):
    _, tokens, _ = modules
    call, arena = next(bench.calls()), bench.engine.arena
    for slot, reference in enumerate(call.references):
        bench.expand(reference, slot, CallPlan())
    every, none = (tokens.Threshold(arena, limit) for limit in (0.0, float('inf')))
    errors = [bench.error(call, way, DenseFFN()) for way in (every, none)]
    assert set(every.recomputed) == {0.5} and set(none.recomputed) == {0.0} and errors[0] < errors[1]


def test_every_way_is_measured_at_the_share_it_says(bench, modules):
    _, tokens, neurons = modules
    rows = {name: (share, error) for name, share, error, _ in tokens.measure(bench)}
    total = bench.engine.arena.shape.tokens
    for ratio in tokens.RATIOS:
        same = {name: row for name, row in rows.items() if name.endswith(f' {ratio:g}') and 'threshold' not in name}
        assert len(same) == 5
        for name, (share, _) in same.items():
            assert share == pytest.approx(ratio, abs=1.5 / total), name
    spent = {name: (share, error) for name, share, error, _ in neurons.measure(bench)}
    assert len(spent) == len(neurons.RATIOS) * (len(neurons.TILTS) + 3)
    even, tilted = (spent[f'step_tilt {step:g}, layer_tilt {layer:g}: 0.5'] for step, layer in ((0, 0), (0.4, 0.3)))
    assert even[0] == pytest.approx(0.5, abs=0.02) and even[1] != tilted[1]
    assert all(error > 0 for _, error in spent.values())
