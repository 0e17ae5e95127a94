# SPDX-License-Identifier: Apache-2.0
"""The graph engine against the eager one, and that a call depends on nothing but what it is given.

On a CPU a program is the recorded body itself, over the same buffers and with the same slot indirection as a graph.
"""

from __future__ import annotations

import random
import threading
from dataclasses import replace

import pytest
import torch
from engine_parts import make_inputs, make_reference, small_config, small_model

from rmuscle_core.bench.sizes import SIZES
from rmuscle_core.engine.build import build_engine, obstacle
from rmuscle_core.engine.eager import EagerEngine
from rmuscle_core.engine.graphs import GraphEngine
from rmuscle_core.engine.packed import PackedVLA
from rmuscle_core.engine.plan import BUCKETS, CallPlan, bucket_of, plan_call
from rmuscle_core.engine.spread import even
from rmuscle_core.errors import CheckpointError, EpisodeError, ObservationError
from rmuscle_core.ffn import Interrupted
from rmuscle_core.model import VLA, TransformerConfig
from rmuscle_core.settings import RESIDUALS, Settings

SETTINGS = Settings(slots=4, group_size=2)
NINE = (9, 24, 4), (10, 9, 9)  # of 24, by mask group and layer
FULL = CallPlan(tokens=13, neurons=NINE, residual='anchored')
PLANS = (CallPlan(), CallPlan(tokens=13), *(CallPlan(neurons=NINE, residual=residual) for residual in RESIDUALS), FULL,
         CallPlan(tokens=0, neurons=even(4, 2, 3)))


def nothing() -> None:
    return None


def expand(engine, reference, slot, plan=FULL):
    engine.expand(reference, slot, engine.rank_neurons(reference, nothing), plan, nothing)


@pytest.fixture(scope='module')
def references():
    model = small_model()
    return [make_reference(model, 100 + i, length) for i, length in enumerate((9, 17, 33))]


@pytest.fixture(scope='module')
def engine(references):
    """A graph engine with references in slots 0 to 2; slot 3 is free."""
    engine = GraphEngine(small_model(), SETTINGS, views=2)
    for slot, reference in enumerate(references):
        expand(engine, reference, slot)
    return engine


def call(engine, seed, plan, slot, length=11):
    return engine.act(engine.embed(make_inputs(seed, length)), plan, slot)[0]


@pytest.mark.parametrize('plan', PLANS)
def test_equals_the_eager_engine(engine, references, plan):
    eager = EagerEngine(small_model(), SETTINGS, views=2)
    expand(eager, references[1], 1)
    for length in (11, 16, 31):
        torch.testing.assert_close(call(engine, 5, plan, 1, length), call(eager, 5, plan, 1, length), atol=1e-5, rtol=0)


def test_rankings_and_expanded_states_equal_the_eager_ones(engine, references):
    eager = EagerEngine(small_model(), SETTINGS, views=2)
    for slot, reference in enumerate(references):
        assert torch.equal(engine.rank_neurons(reference, nothing), eager.rank_neurons(reference, nothing))
        expand(eager, reference, slot)
    for name in ('x', 'y', 'residual', 'neurons'):
        fast, plain = (getattr(e.arena, name)[:3] for e in (engine, eager))
        torch.testing.assert_close(fast, plain, atol=1e-5, rtol=1e-5)


def test_without_a_slot_or_with_other_views_nothing_is_reused(engine):
    dense = call(engine, 5, CallPlan(), None)
    assert torch.equal(call(engine, 5, FULL, None), dense)
    one_view = engine.embed(make_inputs(5, views=('left',)))
    chunk = engine.act(one_view, CallPlan(tokens=13), 0)[0]
    assert torch.equal(chunk, engine.act(one_view, CallPlan(), None)[0]) and not torch.equal(chunk, dense)


@pytest.mark.parametrize('seed', range(50))
def test_a_call_depends_only_on_its_observation_plan_and_reference(engine, references, seed):
    """Bit-equal to a fresh engine's first call, whatever ran before, while another slot is being expanded."""
    rng = random.Random(seed)
    plan, slot, length = rng.choice(PLANS), rng.randrange(3), rng.choice((5, 11, 16, 31))
    fresh = GraphEngine(small_model(), SETTINGS, views=2)
    fresh.arena.slot.fill_(rng.randrange(4))
    for name in ('x', 'y', 'residual', 'neurons'):
        getattr(fresh.arena, name)[slot] = getattr(engine.arena, name)[slot]
    expected = call(fresh, seed, plan, slot, length)
    for _ in range(rng.randrange(3)):
        call(engine, rng.randrange(1000), rng.choice(PLANS), rng.choice((None, 0, 1, 2)), rng.choice((5, 11, 31)))
    racing = threading.Thread(target=expand, args=(engine, rng.choice(references), 3))
    racing.start()
    chunks = [call(engine, seed, plan, slot, length) for _ in range(2)]
    racing.join()
    assert all(torch.equal(chunk, expected) for chunk in chunks)


def test_an_interrupted_expansion_stops_at_the_next_cut_and_can_be_repeated(engine, references):
    asked = []

    def stop_at_third():
        asked.append(len(asked))
        if len(asked) == 3:
            raise Interrupted

    neurons = engine.rank_neurons(references[0], nothing)
    before = engine.arena.residual[3].clone()
    with pytest.raises(Interrupted):
        engine.expand(references[0], 3, neurons, FULL, stop_at_third)
    assert len(asked) == 3 and torch.equal(engine.arena.residual[3], before)
    expand(engine, references[0], 3)
    for name in ('x', 'y', 'residual', 'neurons'):
        assert torch.equal(getattr(engine.arena, name)[3], getattr(engine.arena, name)[0])


def test_prepare_records_all_that_the_calls_replay():
    engine = GraphEngine(small_model(), SETTINGS, views=2)
    settings = SETTINGS.with_values(mode='full')
    engine.prepare(settings, text=11)
    prepared = set(engine.calls.keys)
    embedded = engine.embed(make_inputs(1))
    engine.act(embedded, plan_call(settings, engine.model.config, embedded.tokens, embedded.text), 0)
    engine.act(embedded, CallPlan(), None)
    assert set(engine.calls.keys) == prepared
    engine.prepare(settings, text=11)  # may have run over the same memory
    with pytest.raises(RuntimeError, match='latest embed'):
        engine.act(embedded, CallPlan(), None)


def test_only_the_latest_embedding_can_be_acted_on(engine):
    first = engine.embed(make_inputs(1))
    engine.embed(make_inputs(2))
    with pytest.raises(RuntimeError, match='latest embed'):
        engine.act(first, CallPlan(), None)


def test_prompts_go_to_the_next_bucket():
    assert [bucket_of(n, 200) for n in (1, 16, 17, 129, 200)] == [16, 16, 32, 200, 200]
    assert bucket_of(30, 40) == 32 and bucket_of(33, 40) == 40 and BUCKETS[-1] == 200
    with pytest.raises(ObservationError, match='41 tokens, this checkpoint takes 40'):
        bucket_of(41, 40)


def test_recomputed_rows_fill_whole_tiles_with_the_padded_prompt():
    config = replace(small_config(), prompt_length=200)
    for text in (1, 16, 50, 63):
        plan = plan_call(SETTINGS.with_values(token_ratio=0.5), config, 768, text)
        assert (plan.tokens + bucket_of(text, 200)) % 64 == 0 and plan.tokens >= 384
        assert plan == plan_call(SETTINGS.with_values(token_ratio=0.5), config, 768, bucket_of(text, 200))


def test_all_neurons_leave_nothing_for_a_residual_to_stand_in_for():
    every = plan_call(SETTINGS.with_values(neuron_ratio=1.0), small_config(), 32, 11)
    assert (every.neurons, every.residual) == (even(24, 2, 3), 'none')
    assert plan_call(SETTINGS.with_values(neuron_ratio=0.5), small_config(), 32, 11).residual == SETTINGS.residual


def test_a_reference_with_other_views_is_refused(engine, references):
    reference = references[0]
    short = type(reference)(**{**vars(reference), 'prefix': reference.prefix[:16]})
    with pytest.raises(EpisodeError, match='16 visual tokens, this policy 32'):
        engine.expand(short, 3, torch.zeros(2, 3, 18, dtype=torch.int32), FULL, nothing)


def test_eight_bit_weights_get_the_eager_engine_since_no_kernel_reads_them():
    config = replace(SIZES['pi05'], weight_dtype='fp8')
    assert obstacle(SIZES['pi05']) == '' and 'fp8' in obstacle(config)
    with pytest.raises(CheckpointError, match='8-bit'):
        PackedVLA(VLA(replace(small_config(), weight_dtype='fp8')))


def test_a_cpu_and_pi0_get_the_eager_engine():
    for kind in ('pi05', 'pi0'):
        assert isinstance(build_engine(small_model(kind), SETTINGS, 2), EagerEngine)


@pytest.mark.parametrize(('change', 'word'), [
    ({'kind': 'pi0'}, 'state token'), ({'dtype': 'float32'}, '"dtype": "bfloat16"'), ({'weight_dtype': 'fp8'}, 'fp8'),
    ({'prefix': TransformerConfig(2050, 18, 16384)}, '2050')])
def test_what_the_fast_engine_cannot_serve_is_said_with_its_reason(change, word):
    assert word in obstacle(replace(SIZES['pi05'], **change))


@pytest.mark.parametrize('kind', [EagerEngine, GraphEngine])
def test_a_dense_call_is_repeated_on_the_other_lane_while_calls_go_on(kind):
    engine = kind(small_model(), SETTINGS, 2)
    embedded = engine.embed(make_inputs(1))
    expected, _ = engine.act(embedded, CallPlan(), None)
    kept = replace(embedded, prefix=embedded.prefix.clone())

    def call_in_between() -> None:
        engine.act(engine.embed(make_inputs(2, length=14)), CallPlan(), None)

    torch.testing.assert_close(engine.dense(kept, call_in_between), expected, atol=1e-5, rtol=1e-4)

    def due() -> None:
        raise Interrupted

    with pytest.raises(Interrupted):
        engine.dense(kept, due)


def test_work_beside_calls_leaves_the_scratch_of_the_fused_kernels_alone():
    engine = GraphEngine(small_model(), SETTINGS, 2)
    embedded = engine.embed(make_inputs(1))
    kept, reference = replace(embedded, prefix=embedded.prefix.clone()), make_reference(small_model(), 1)
    hidden = engine.model.expert.workspace.hidden
    for work in (lambda: engine.dense(kept, nothing), lambda: expand(engine, reference, 0)):
        hidden.fill_(7)
        work()
        assert (hidden == 7).all()  # a call in flight on the other lane may be using it
    engine.act(embedded, CallPlan(), None)
    assert not (hidden == 7).all()


@pytest.mark.parametrize('slots', [2, 1, 0])
def test_an_engine_that_gave_slots_back_goes_on(slots):
    engine, model = GraphEngine(small_model(), SETTINGS, 2), small_model()
    expand(engine, make_reference(model, 1), 3)
    engine.act(engine.embed(make_inputs(1)), FULL, 3)
    before = engine.arena.nbytes
    engine.shrink(slots)
    assert engine.arena.nbytes == before * slots // 4 and engine.calls.keys == engine.spare.keys == []
    engine.prepare(SETTINGS, 11)
    if slots:
        expand(engine, make_reference(model, 1), slots - 1)
        assert torch.isfinite(engine.act(engine.embed(make_inputs(1)), FULL, slots - 1)[0]).all()
    assert torch.isfinite(engine.act(engine.embed(make_inputs(1)), CallPlan(), None)[0]).all()
