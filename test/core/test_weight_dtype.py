# SPDX-License-Identifier: Apache-2.0
"""The setting weight_dtype from the command line and the policy down: exact where it must be, told apart elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_policy import WAIT_S, run

from rmuscle_core.bench import roofline
from rmuscle_core.bench.calls import random_inputs
from rmuscle_core.bench.sizes import SIZES, sized
from rmuscle_core.cli import main
from rmuscle_core.engine.eager import EagerEngine
from rmuscle_core.engine.plan import CallPlan
from rmuscle_core.model import load_model
from rmuscle_core.model.quantized import QuantizedGeGLU
from rmuscle_core.settings import Settings

POLICY = Path(__file__).parents[2] / 'config' / 'policy' / 'transfer_cube'
FP8 = Settings(weight_dtype='fp8', min_similarity=0.0)


@pytest.fixture
def load(open_policy):
    return lambda settings=FP8, library=None: open_policy(settings, library)


@pytest.fixture
def library(load, look, tmp_path):
    """A library of one episode recorded with 8-bit weights."""
    policy = load(library=tmp_path / 'library')
    run(policy, [look(1, place) for place in range(2)])
    policy.save_episode(True).result(WAIT_S)
    return tmp_path / 'library'


def test_ratios_of_one_equal_the_dense_policy_with_the_same_weights_bit_for_bit(load, look, library):
    seen = [look(2, 0), look(2, 1)]
    dense = run(load(FP8.with_values(mode='dense')), seen)
    full = run(load(FP8.with_values(token_ratio=1, neuron_ratio=1), library), seen)
    whole = run(load(Settings(mode='dense')), seen)
    assert [chunk.report.path for chunk in full] == ['library', 'library']
    for a, b, c in zip(dense, full, whole, strict=True):
        assert np.array_equal(a.actions, b.actions)
        assert not np.array_equal(a.actions, c.actions)


def test_both_caches_work_on_eight_bit_weights(load, look, library):
    policy = load(FP8.with_values(profile='default'), library)
    assert isinstance(policy.model.expert.layers[0].mlp, QuantizedGeGLU)
    chunk, = run(policy, [look(3, 0)])
    dense, = run(load(FP8.with_values(mode='dense')), [look(3, 0)])
    other, = run(load(FP8.with_values(mode='dense')), [look(3, 7)])
    assert chunk.report.path == 'library' and chunk.report.neurons_evaluated < chunk.report.neurons
    assert 0 < np.abs(chunk.actions - dense.actions).mean() < 0.5 * np.abs(other.actions - dense.actions).mean()


def test_a_library_belongs_to_one_way_of_holding_weights(load, look, library):
    policy = load(Settings(), library)
    assert 'numerics (library: float32 lerobot fp8; here: float32 lerobot)' in policy.problems[0]
    assert policy.infer(look()).report.path == 'dense'


def test_the_shipped_policy_acts_almost_the_same():
    exact, narrow = load_model(POLICY), load_model(POLICY, weight_dtype='fp8')
    joints, inputs = exact.config.action_dim, random_inputs(exact.config, 52)
    engines = [EagerEngine(model, Settings(slots=1), len(exact.config.cameras)) for model in (exact, narrow)]
    a, b = (engine.act(engine.embed(inputs), CallPlan(), None)[0][:, :joints] for engine in engines)
    assert 0 < (a - b).norm() < 0.02 * a.norm()


def test_the_bench_measures_them(capsys):
    assert main(['bench', '--size', 'tiny', '--rounds', '1', '--weight-dtype', 'fp8', '--json']) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])['weight_dtype'] == 'fp8'


def test_the_roofline_counts_half_the_bytes_of_ffn_weights_at_16_bit():
    whole, narrow = SIZES['pi05'], sized('pi05', weight_dtype='fp8')
    a, b = (roofline.stages(config, 3, 50, CallPlan(), 2) for config in (whole, narrow))
    assert sum(m for _, m in b['denoise ffn']) == pytest.approx(sum(m for _, m in a['denoise ffn']) / 2)
    assert b['vision'] == a['vision'] and b['denoise attention'] == a['denoise attention']


def test_bfloat16_activations_meet_eight_bit_weights():
    model = load_model(POLICY, dtype='bfloat16', weight_dtype='fp8')
    engine = EagerEngine(model, Settings(slots=1), len(model.config.cameras))
    actions, _ = engine.act(engine.embed(random_inputs(model.config, 52)), CallPlan(), None)
    assert torch.isfinite(actions).all()
