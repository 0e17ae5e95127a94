# SPDX-License-Identifier: Apache-2.0
"""Guided denoising: LeRobot's formula without its autograd, on both engines, dense and cached."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_parts import make_inputs, make_reference, small_config, small_model

from rmuscle_core.engine.eager import EagerEngine
from rmuscle_core.engine.graphs import GraphEngine
from rmuscle_core.engine.plan import CallPlan
from rmuscle_core.engine.spread import even
from rmuscle_core.model import VLA
from rmuscle_core.model.guidance import Guidance, gain, prefix_weights
from rmuscle_core.settings import Settings

SETTINGS = Settings(slots=2, group_size=2)
PLANS = (CallPlan(), CallPlan(tokens=13), CallPlan(tokens=13, neurons=even(9, 4, 3), residual='anchored'),
         CallPlan(neurons=even(9, 4, 3), residual='reference'))


def lerobot_velocity(velocity, x, time, target, weights, limit):
    """LeRobot's RTC step as it is run: the denoiser is outside the graph, so autograd sees x alone."""
    x = x.clone().detach().requires_grad_(True)
    with torch.enable_grad():
        predicted = x - time * velocity
        error = (target - predicted) * weights
        correction, = torch.autograd.grad(predicted, x, error.clone().detach())
    tau = torch.as_tensor(1 - time)
    limit = torch.as_tensor(limit)
    inverse_r2 = ((1 - tau) ** 2 + tau ** 2) / (1 - tau) ** 2
    c = torch.nan_to_num((1 - tau) / tau, posinf=float(limit))
    weight = torch.minimum(torch.nan_to_num(c * inverse_r2, posinf=float(limit)), limit)
    return velocity - weight * correction


def lerobot_weights(start, end, total, schedule):
    start = min(start, end)
    ramp = torch.linspace(1, 0, end - start + 2)[1:-1] if end > start else torch.tensor([])
    if schedule == 'exp':
        ramp = ramp * torch.expm1(ramp).div(math.e - 1)
    return torch.cat([torch.ones(start), ramp, torch.zeros(max(total - end, 0))])


@pytest.mark.parametrize('schedule', ['exp', 'linear'])
@pytest.mark.parametrize(('executed', 'end'), [(0, 10), (4, 10), (10, 10), (12, 10), (3, 50), (0, 0), (50, 50)])
def test_weights_are_lerobots(schedule, executed, end):
    expected = lerobot_weights(executed, end, 50, schedule)
    np.testing.assert_allclose(prefix_weights(executed, end, 50, schedule), expected, atol=1e-6)


@pytest.mark.parametrize('schedule', ['exp', 'linear'])
def test_every_step_is_lerobots(schedule):
    generator = torch.Generator().manual_seed(0)
    x, velocity, target = (torch.randn(1, 50, 32, generator=generator) for _ in range(3))
    weights = torch.from_numpy(prefix_weights(5, 20, 50, schedule))[:, None].expand(50, 32)
    guidance = Guidance(target[0], weights, 10.0)
    for step in range(10):
        expected = lerobot_velocity(velocity, x, 1 - step / 10, target, weights, 10.0)
        torch.testing.assert_close(guidance(velocity, x, step, 10), expected, atol=2e-5, rtol=1e-5)


def test_gain_never_overshoots_the_target():
    for steps in (1, 4, 10, 20):
        for step in range(steps):
            assert 0 < gain(step, steps, 1e3) <= steps


def straight_flow(goal, steps=10):
    """A model whose flow leads straight to ``goal`` [H, A_pad] from anywhere."""
    model = VLA(replace(small_config(), steps=steps))
    model.velocity = lambda cache, x, step, ffn, state=None: (x - goal) / (1 - step / steps)
    return model


def test_boundary_jump_shrinks_as_the_closed_form_says():
    """On a straight flow only the last step's correction remains, so of a jump d is left d (1 - w gain / K)."""
    goal, running = torch.full((5, 32), 0.8), torch.full((5, 32), 0.2)
    model, noise = straight_flow(goal), torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(1))
    guidance = Guidance.towards(running.numpy(), 2, (5, 32), horizon=0, schedule='linear', limit=10.0)
    free = model.denoise(None, noise, None)[0]
    held = model.denoise(None, noise, None, guidance=guidance)[0]
    torch.testing.assert_close(free, goal, atol=1e-6, rtol=0)
    left = (0.8 - 0.2) * (1 - guidance.weights * gain(9, 10, 10.0) / 10)
    torch.testing.assert_close(held - running, left, atol=1e-5, rtol=0)
    assert left[:2].max() < 0.1 * 0.6 and gain(9, 10, 10.0) > 9


@pytest.mark.parametrize('kind', ['pi05', 'pi0'])
def test_executed_steps_are_kept_and_what_is_not_held_is_free(kind):
    model = small_model(kind)
    engine = EagerEngine(model, SETTINGS, views=2)
    inputs = make_inputs(3)
    free, _ = engine.act(engine.embed(inputs), CallPlan(), None)
    running = (free[:4, :3] + 0.5).numpy()
    guidance = Guidance.towards(running, 2, (5, 32), horizon=3, schedule='exp', limit=10.0)
    assert guidance.weights[:, 3:].eq(0).all() and guidance.weights[3:].eq(0).all()  # padding holds nothing
    held, _ = engine.act(engine.embed(replace(inputs, guidance=guidance)), CallPlan(), None)
    off = np.abs(held[:, :3].numpy() - np.concatenate([running, running[-1:]]))
    # a gain of 3.3 in the last of four steps leaves a sixth of the half, less what earlier steps moved the flow
    assert off[:2].max() < 0.1 and off[2].max() < 0.5
    again, _ = engine.act(engine.embed(inputs), CallPlan(), None)
    assert torch.equal(free, again)


@pytest.mark.parametrize('plan', PLANS)
def test_captured_programs_are_guided_as_the_plain_engine(plan):
    model = small_model()
    eager, graphs = EagerEngine(model, SETTINGS, views=2), GraphEngine(small_model(), SETTINGS, views=2)
    reference = make_reference(model, 100)
    for engine in (eager, graphs):
        engine.expand(reference, 1, engine.rank_neurons(reference, lambda: None), PLANS[2], lambda: None)
    slot = None if plan.dense else 1
    rows = np.random.default_rng(0).uniform(-1, 1, (2, 4, 3)).astype(np.float32)
    results = []
    for leftover in rows:  # the same program with other contents
        guidance = Guidance.towards(leftover, 1, (5, 32), horizon=0, schedule='exp', limit=10.0)
        inputs = replace(make_inputs(5), guidance=guidance)
        found = [engine.act(engine.embed(inputs), plan, slot)[0] for engine in (eager, graphs)]
        torch.testing.assert_close(found[1], found[0], atol=2e-5, rtol=0)
        results.append(found[0])
    assert (results[0] - results[1]).abs().max() > 0.01
    plain = [engine.act(engine.embed(make_inputs(5)), plan, slot)[0] for engine in (eager, graphs)]
    torch.testing.assert_close(plain[1], plain[0], atol=1e-5, rtol=0)
    programs = {key for key in graphs.calls.keys if key[0] == 'denoise'}
    assert len(programs) == 2


def test_prepare_captures_guided_calls_only_where_they_are_wanted():
    for rtc, wanted in (('off', {None}), ('exp', {None, 8.0})):
        engine = GraphEngine(small_model(), SETTINGS, views=2)
        settings = SETTINGS.with_values(rtc=rtc, rtc_weight=8.0)
        engine.prepare(settings, 11)
        assert {limit for kind, *_, limit in engine.calls.keys if kind == 'denoise'} == wanted
    before = engine.calls.keys
    guidance = Guidance.towards(np.zeros((2, 3), np.float32), 1, (5, 32), horizon=0, schedule='exp', limit=8.0)
    engine.act(engine.embed(replace(make_inputs(5), guidance=guidance)), CallPlan(), None)
    assert engine.calls.keys == before
