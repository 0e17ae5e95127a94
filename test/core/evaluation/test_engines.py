# SPDX-License-Identifier: Apache-2.0
"""What is compared in closed loop: each engine against the case in which it must equal the plain one."""

import numpy as np
import pytest
import torch

from rmuscle_core.engine.eager import EagerEngine
from rmuscle_core.engine.plan import CallPlan, plan_call
from rmuscle_core.evaluation import engines
from rmuscle_core.memory import rank
from rmuscle_core.model import load_model
from rmuscle_core.settings import Settings

FULL = Settings(token_ratio=0.3, neuron_ratio=0.5, mask_ratio=0.75, slots=2, group_size=2)


@pytest.fixture(scope='module')
def policy(tiny_checkpoint):
    from rmuscle_core.policy import MusclePolicy

    opened = MusclePolicy.load(tiny_checkpoint, FULL)
    yield opened
    opened.close()


@pytest.fixture
def made(policy, look):
    """made(engine class): the engine with a reference expanded in slot 1, another observation and the plan."""
    def make(kind):
        engine = kind(policy.model, FULL, len(policy.cameras))
        reference, = policy.record_references([look(place=1)], 'task', 'episode')
        embedded = engine.embed(policy._encode(look(place=2)))
        plan = plan_call(FULL, policy.config, embedded.tokens, embedded.text)
        expand(engine, reference, 1, plan)
        return engine, reference, embedded, plan
    return make


def expand(engine, reference, slot, plan):
    engine.expand(reference, slot, torch.from_numpy(reference.neurons.astype(np.int32)), plan, lambda: None)


def act(engine, embedded, plan, slot):
    return engine.act(embedded, plan, slot)[0]


def test_a_remembered_expansion_is_the_computed_one(made):
    plain, reference, embedded, plan = made(EagerEngine)
    memo, *_ = made(engines.MemoEngine)
    expand(memo, reference, 0, plan)  # the second time: copied
    for name in ('x', 'y', 'neurons', 'residual'):
        assert torch.equal(getattr(memo.arena, name)[0], getattr(plain.arena, name)[1]), name
    assert torch.equal(act(memo, embedded, plan, 0), act(plain, embedded, plan, 1))


def test_a_plan_with_other_neurons_is_computed_anew(made):
    memo, reference, _, plan = made(engines.MemoEngine)
    other = CallPlan(plan.tokens, tuple(tuple(count // 2 for count in row) for row in plan.neurons), plan.residual)
    expand(memo, reference, 0, other)
    assert not torch.equal(memo.arena.residual[0], memo.arena.residual[1])


def test_skipped_steps_reuse_the_last_velocity(made, tiny_checkpoint):
    skip, _, embedded, _ = made(engines.SkipSteps)
    calls, velocity = [], skip.model.velocity
    skip.model.velocity = lambda cache, x, step, *rest: calls.append(step) or velocity(cache, x, step, *rest)
    try:
        actions = act(skip, embedded, CallPlan(), None)
    finally:
        del skip.model.velocity
    assert calls == list(range(0, skip.model.config.steps, 2))
    # Euler at twice the step width is the same thing
    half = EagerEngine(load_model(tiny_checkpoint, steps=len(calls)), FULL, 2)
    assert torch.allclose(actions, act(half, embedded, CallPlan(), None), atol=1e-5)


def test_a_warm_start_from_noise_alone_is_dense_and_replay_is_the_reference(made, policy, look):
    plain, reference, embedded, plan = made(EagerEngine)
    whole, *_ = made(engines.warm_start(1.0))
    assert torch.allclose(act(whole, embedded, plan, 1), act(plain, embedded, CallPlan(), None), atol=1e-5)
    replay, *_ = made(engines.Replay)
    own = policy.processor.decode(act(replay, embedded, plan, 1).numpy(), look(place=2))
    assert np.allclose(own, reference.chunk, atol=1e-3)  # its prefix was kept in bfloat16
    assert torch.allclose(act(replay, embedded, plan, None), act(plain, embedded, CallPlan(), None), atol=1e-6)
    expand(replay, reference, 0, plan)
    assert torch.equal(replay.chunks[0], replay.chunks[1])


def test_random_choices_are_of_the_same_size_but_others(made):
    plain, _, embedded, plan = made(EagerEngine)
    for kind in (engines.RandomNeurons, engines.RandomTokens):
        other, *_ = made(kind)
        assert other.arena.neurons.shape == plain.arena.neurons.shape
        assert not torch.allclose(act(other, embedded, plan, 1), act(plain, embedded, plan, 1), atol=1e-4), kind
    drawn, *_ = made(engines.RandomNeurons)
    kept = drawn.arena.neurons[1, 0, 0].tolist()
    assert len(set(kept)) == len(kept) and kept != plain.arena.neurons[1, 0, 0].tolist()
    everything = CallPlan(tokens=embedded.tokens)
    tokens, *_ = made(engines.RandomTokens)
    assert torch.allclose(act(tokens, embedded, everything, 1), act(plain, embedded, CallPlan(), None), atol=1e-5)


def test_a_dense_first_step_brings_actions_nearer_to_dense(made):
    plain, _, embedded, plan = made(EagerEngine)
    first, *_ = made(engines.DenseFirstStep)
    neurons = CallPlan(neurons=plan.neurons, residual='none')
    dense = act(plain, embedded, CallPlan(), None)
    errors = [(act(engine, embedded, neurons, 1) - dense).abs().mean() for engine in (first, plain)]
    assert errors[0] < errors[1]


def test_rank_by_change_orders_neurons_by_what_differs_between_episodes(policy, look):
    from rmuscle_core.evaluation.libraries import _contributions, rank_by_change

    first, = policy.record_references([look(place=1)], 'task', 'a')
    second, = policy.record_references([look(place=3)], 'task', 'b')
    (ranked,), _ = rank_by_change(policy, [[first], [second]])
    change = (_contributions(policy, first) - _contributions(policy, second)).abs().sum(2)[:FULL.group_size].sum(0)[0]
    assert change[int(ranked.neurons[0, 0, 0])] == change.max()
    assert ranked.neurons.shape == first.neurons.shape and not np.array_equal(ranked.neurons, first.neurons)
    assert not np.array_equal(rank(policy.engine, first), ranked.neurons)
