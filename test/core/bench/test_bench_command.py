# SPDX-License-Identifier: Apache-2.0
"""``rmuscle bench`` at sizes that take moments: what it prints and what the JSON holds."""

import json
import re
from dataclasses import replace

import pytest
import torch

from rmuscle_core.bench import calls, layers, reconstruct, roofline, runs
from rmuscle_core.bench.sizes import SIZES, TEXT, random_model
from rmuscle_core.cli import main
from rmuscle_core.engine import budget
from rmuscle_core.engine.eager import EagerEngine
from rmuscle_core.engine.graphs import GraphEngine
from rmuscle_core.library import ReferenceId
from rmuscle_core.model import TransformerConfig, save_checkpoint
from rmuscle_core.settings import PROFILES, Settings

CPU = torch.device('cpu')


@pytest.fixture(autouse=True)
def brief_peaks(monkeypatch):
    monkeypatch.setattr(roofline, 'PEAK_SECONDS', 0.05)


def bench(capsys, *arguments):
    assert main(['bench', *arguments, '--json']) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_calls_have_each_cache_apart_and_every_profile(capsys, tmp_path):
    out = tmp_path / 'deep' / 'bench.json'
    found = bench(capsys, '--size', 'tiny', '--rounds', '2', '--out', str(out), '--views', '2', '1')
    assert {'speedup.context.default', 'speedup.action.default', 'speedup.full.fast', 'speedup.full.default',
            'speedup.full.slow'} <= set(found)
    assert json.loads(out.read_text()) == found
    first, second = found['cases']
    assert (first['views'], second['views']) == (2, 1)
    row = first['rows']['full.default']
    assert row['ms']['n'] == 2 and set(row['stages_ms']) == {'vision', 'prefill', 'denoise'}
    assert row['speedup']['p50'] == found['speedup.full.default']
    assert 0 < row['floor ms'] < first['rows']['dense']['floor ms']
    assert first['rows']['dense']['ms']['n'] == 2 * 6  # the baseline runs around every variant
    assert sum(first['time_shares'].values()) == pytest.approx(1, abs=0.01)
    assert found['machine']['torch'] == torch.__version__


def test_a_checkpoint_is_measured_as_it_is(capsys, tmp_path):
    model = random_model(SIZES['tiny'], CPU)
    save_checkpoint(model, tmp_path)
    found = bench(capsys, '--checkpoint', str(tmp_path), '--rounds', '1')
    assert found['cases'][0]['chunk'] == SIZES['tiny'].chunk_size


def test_variants_use_the_caches_they_name():
    config = SIZES['tiny']
    inputs = calls.random_inputs(config, TEXT['tiny'])
    variants = {v.name: v for v in calls.make_variants(random_model(config, CPU), Settings(), inputs)}
    assert list(variants) == ['dense', 'context.default', 'action.default', *(f'full.{p}' for p in PROFILES)]
    assert variants['dense'].slot is None and variants['dense'].plan.dense
    assert variants['context.default'].plan.neurons is None and variants['action.default'].plan.tokens is None
    assert variants['full.fast'].plan.tokens < variants['full.slow'].plan.tokens
    engine = variants['dense'].engine
    for variant in variants.values():  # the references are expanded: a cached call comes out near the dense one
        embedded = engine.embed(inputs)
        dense, _ = engine.act(embedded, variants['dense'].plan, None)
        actions, _ = engine.act(embedded, variant.plan, variant.slot)
        assert (actions - dense).norm() < 0.2 * dense.norm(), variant.name


def test_layers_compare_both_ratios_with_dense():
    sizes = TransformerConfig(width=32, layers=1, mlp=64)
    for found in (layers.compare_prefix(2, CPU, torch.float32, sizes, tokens=20),
                  layers.compare_expert(2, CPU, torch.float32, sizes, chunk=6)):
        assert set(found.milliseconds) == {'dense', '0.35', '0.5'}
        assert all(len(found.speedups[ratio]) == 2 for ratio in ('0.35', '0.5'))


def test_retrieval_and_memory(capsys):
    assert set(bench(capsys, '--retrieval', '--rounds', '3')['microseconds']) == {'match', 'plan', 'total'}
    assert [row['entries'] for row in bench(capsys, '--memory')['libraries']] == [200, 400, 800]


def test_roofline_needs_no_device(capsys):
    found = bench(capsys, '--roofline', '--views', '2')['floors_ms']
    assert found['Jetson AGX Thor, 2 views']['default']['total'] > 0


def test_reconstruction_runs_between_calls_and_yields_to_them():
    config = SIZES['tiny']
    model, inputs = random_model(config, CPU), calls.random_inputs(config, TEXT['tiny'])
    engine = runs.build_engine(model, Settings(slots=2), 2)
    reference = calls.record(engine, calls.perturbed(inputs), ReferenceId('t', 'e', 0))
    plan = runs.plan_call(Settings(), config, reference.prefix.shape[0], TEXT['tiny'])
    calls.expand(engine, reference, 0, plan)
    kept = engine.arena.y[0].clone()
    variant = calls.Variant('full', engine, plan, 0)
    found = reconstruct.measure_interference(variant, reference, 1, inputs, rounds=4)
    assert len(found.idle) == len(found.working) == 4
    assert found.expanded + found.interrupted > 0
    assert torch.equal(engine.arena.y[0], kept) and torch.equal(engine.arena.y[1], kept)


def test_an_absent_device_is_one_sentence(capsys):
    if torch.cuda.is_available():
        pytest.skip('there is a CUDA device')
    assert main(['bench', '--device', 'cuda', '--size', 'tiny']) == 2
    assert "not 'cuda'" in capsys.readouterr().err


def test_too_many_views_are_refused(capsys):
    assert main(['bench', '--size', 'tiny', '--views', '9', '--rounds', '1']) == 2
    assert '--views: expected a whole number from 1 to 3' in capsys.readouterr().err


def test_the_graph_engine_is_measured_against_the_eager_one_too(monkeypatch):
    monkeypatch.setattr(calls, 'build_engine', GraphEngine)
    config = SIZES['tiny']
    inputs = calls.random_inputs(config, TEXT['tiny'])
    variants = {v.name: v for v in calls.make_variants(random_model(config, CPU), Settings(), inputs)}
    assert isinstance(variants['dense_eager'].engine, EagerEngine) and variants['dense_eager'].slot is None
    assert isinstance(variants['full.default'].engine, GraphEngine)
    found = calls.compare_calls(list(variants.values()), inputs, rounds=1)
    assert {name for name, ratios in found.speedups.items() if ratios} == {*variants} - {'dense'}


def test_a_model_that_does_not_fit_is_refused_before_it_is_made(monkeypatch, capsys):
    monkeypatch.setattr(budget, 'available_bytes', lambda device: int(5e9))
    monkeypatch.setattr(runs, 'random_model', lambda *_: pytest.fail('the model was made'))
    assert main(['bench', '--random-weights', 'pi05', '--dtype', 'bfloat16']) == 2
    assert re.search(r'need \d+\.\d+ GB, cpu has 5\.00 GB free', capsys.readouterr().err)


def test_random_weights_are_made_once_and_completely():
    for weight_dtype in ('checkpoint', 'fp8'):
        model = random_model(replace(SIZES['tiny'], weight_dtype=weight_dtype), CPU)
        assert not model.training and all(torch.isfinite(p.float()).all() for p in model.parameters())
        assert (model.vision.norm.weight == 1).all() and model.config.weight_dtype == weight_dtype
