# SPDX-License-Identifier: Apache-2.0
"""A fast engine is used only where it agrees with the plain model."""

import weakref

import pytest
import torch
from engine_parts import CAMERAS, small_model

from rmuscle_core.engine import build, packed, packed_expert, packed_ffn, slot_ffn
from rmuscle_core.engine.build import checked
from rmuscle_core.engine.eager import EagerEngine
from rmuscle_core.engine.graphs import GraphEngine
from rmuscle_core.engine.self_check import disagreement
from rmuscle_core.settings import RESIDUALS, Settings

SETTINGS = Settings().with_values(slots=2)


@pytest.fixture
def model():
    return small_model()


@pytest.mark.parametrize('residual', RESIDUALS)
def test_both_engines_agree_with_the_model(model, residual):
    settings = SETTINGS.with_values(residual=residual)
    assert disagreement(EagerEngine(model, settings, len(CAMERAS)), model) == ''
    assert isinstance(checked(GraphEngine, model, settings, len(CAMERAS)), GraphEngine)


@pytest.mark.parametrize(('module', 'part', 'word'), [
    (slot_ffn, 'merge_rows', 'cached'), (packed, 'attend', 'dense'), (packed_ffn, 'gather_geglu', 'dense'),
    (packed_expert, 'ada_rms_norm', 'cached')])
@pytest.mark.parametrize('wrong', [4.0, float('nan')])
def test_a_kernel_that_computes_wrongly_is_found(model, monkeypatch, caplog, module, part, word, wrong):
    right = getattr(module, part)
    monkeypatch.setattr(module, part, lambda *args, **options: right(*args, **options) * wrong)
    engine = checked(GraphEngine, model, SETTINGS, len(CAMERAS))
    assert type(engine) is EagerEngine
    assert word in caplog.text and 'plain engine' in caplog.text


def test_a_compiler_that_fails_costs_only_speed(model, monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError("ptxas fatal: Value 'sm_110a' is not defined")

    monkeypatch.setattr(GraphEngine, 'embed', fail)
    engine = checked(GraphEngine, model, SETTINGS, len(CAMERAS))
    assert type(engine) is EagerEngine and 'sm_110a' in caplog.text


@pytest.mark.parametrize('crash', [False, True])
def test_the_engine_that_failed_is_gone_before_the_plain_one_is_made(model, monkeypatch, crash):
    made = []

    class Kept(GraphEngine):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(weakref.ref(self))

        def embed(self, inputs):
            if crash:
                raise RuntimeError('no ptxas')
            return super().embed(inputs)

    def plain(*arguments):
        made.append(made[0]())
        return EagerEngine(*arguments)

    monkeypatch.setattr(build, 'disagreement', disagreement if crash else lambda *_: 'it is wrong')
    monkeypatch.setattr(build, 'EagerEngine', plain)
    checked(Kept, model, SETTINGS, len(CAMERAS))
    assert len(made) == 2 and made[1] is None  # two engines' slots need not fit


def test_memory_that_runs_out_is_not_hidden(model, monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError('no memory')

    monkeypatch.setattr(GraphEngine, 'embed', fail)
    with pytest.raises(torch.OutOfMemoryError):
        checked(GraphEngine, model, SETTINGS, len(CAMERAS))
