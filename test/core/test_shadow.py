# SPDX-License-Identifier: Apache-2.0
"""The shadow check: what it measures, when it steps back, and that it cannot swing."""

import math
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_policy import PROMPT, WAIT_S, run

from rmuscle_core import shadow
from rmuscle_core.engine.eager import Embedded
from rmuscle_core.engine.lane import go_on
from rmuscle_core.ffn import Interrupted
from rmuscle_core.settings import PROFILES, Settings
from rmuscle_core.shadow import WINDOW, ShadowCheck, more_careful

OPEN = Settings().with_values(min_similarity=0.0, action_similarity=0.0, shadow_every=1)
ACTIONS, PADDED, STEPS = 5, 32, 8


class Engine:
    """An engine whose dense calls differ from the cached ones by ``off``."""

    def __init__(self, off=0.0):
        self.off, self.repeated = off, []
        self.model = type('Model', (), {'config': type('Config', (), {'action_dim': ACTIONS})})

    def dense(self, embedded, checkpoint):
        checkpoint()
        self.repeated.append(int(embedded.prefix[0, 0, 0]))
        return torch.full((STEPS, PADDED), self.off)


def call(check, settings, number=0, path='library', rows=STEPS, actions=None):
    """One call as the policy makes it; returns the settings it ran with."""
    used = check.temper(settings)
    embedded = Embedded(torch.full((1, 2, 3), float(number)), 2, None)
    actions = torch.zeros(STEPS, PADDED) if actions is None else actions
    work = check.offer(embedded, actions, 'dense' if used.mode == 'dense' else path, rows)
    if work:
        work(go_on)
    return used


def test_every_nth_cached_call_is_repeated():
    check = ShadowCheck(Engine())
    for number in range(10):
        call(check, replace(OPEN, shadow_every=4), number, 'dense' if number == 2 else 'previous_call')
    assert check.engine.repeated == [0, 5, 9] and check.checks == 3


def test_none_is_repeated_when_it_is_switched_off():
    check = ShadowCheck(Engine(1.0))
    for _ in range(2 * WINDOW):
        assert call(check, replace(OPEN, shadow_every=0)).profile == 'default'
    assert check.engine.repeated == [] and math.isnan(check.difference) and check.checks == 0


def test_the_difference_is_that_of_executed_actions_that_mean_something():
    check, actions = ShadowCheck(Engine()), torch.full((STEPS, PADDED), 100.0)
    actions[:4, :ACTIONS] = 0.5
    call(check, OPEN, rows=4, actions=actions)
    assert check.difference == 0.5
    call(check, OPEN, rows=4, actions=0 * actions)
    assert check.difference == 0.25 and check.checks == 2


def test_a_dense_call_that_is_not_finite_measures_nothing():
    check = ShadowCheck(Engine(math.nan))
    call(check, OPEN)
    assert math.isnan(check.difference)


def test_a_call_that_is_due_leaves_the_check_for_the_next_interval():
    check = ShadowCheck(Engine())

    def due():
        raise Interrupted

    check.temper(replace(OPEN, shadow_every=100))
    work = check.offer(Embedded(torch.zeros(1, 2, 3), 2, None), torch.zeros(STEPS, PADDED), 'library', STEPS)
    with pytest.raises(Interrupted):
        work(due)
    assert check.checks == 0
    check.offer(Embedded(torch.ones(1, 2, 3), 2, None), torch.zeros(STEPS, PADDED), 'library', STEPS)(go_on)
    assert check.engine.repeated == [0] and check.checks == 1


def test_what_is_kept_does_not_change_when_the_engine_uses_the_memory_again():
    check, prefix = ShadowCheck(Engine()), torch.full((1, 2, 3), 7.0)
    check.temper(OPEN)
    work = check.offer(Embedded(prefix, 2, None), torch.zeros(STEPS, PADDED), 'library', STEPS)
    prefix.zero_()
    work(go_on)
    assert check.engine.repeated == [7]


@pytest.mark.parametrize('error', [torch.OutOfMemoryError('CUDA out of memory'), ValueError('a bug')])
def test_a_check_that_fails_costs_nothing_but_itself(error):
    check = ShadowCheck(Engine())

    def fail():
        raise error

    check.temper(OPEN)
    embedded = Embedded(torch.zeros(1, 2, 3), 2, None)
    check.offer(embedded, torch.zeros(STEPS, PADDED), 'library', STEPS)(fail)
    assert check.checks == 0 and check.offer(embedded, None, 'dense', STEPS) is None


def test_a_device_lost_in_a_check_is_not_hidden():
    check = ShadowCheck(Engine())

    def fail():
        raise RuntimeError('CUDA error: device-side assert triggered')

    check.temper(OPEN)
    work = check.offer(Embedded(torch.zeros(1, 2, 3), 2, None), torch.zeros(STEPS, PADDED), 'library', STEPS)
    with pytest.raises(RuntimeError, match='assert'):
        work(fail)


def test_calls_step_back_to_slow_and_then_to_dense(caplog):
    check = ShadowCheck(Engine(1.0))
    used = [call(check, OPEN) for _ in range(3 * WINDOW)]
    assert [s.profile for s in used[:WINDOW]] == ['default'] * WINDOW
    assert [(s.profile, s.mode) for s in used[WINDOW:2 * WINDOW]] == [('slow', 'full')] * WINDOW
    assert all(s.mode == 'dense' for s in used[2 * WINDOW:])
    assert 'dense' in check.problem and 'shadow_limit 0.05' in check.problem and check.problem in caplog.text


def test_below_the_limit_nothing_happens():
    check = ShadowCheck(Engine(0.0499))
    assert {call(check, OPEN).profile for _ in range(5 * WINDOW)} == {'default'} and check.problem == ''


@pytest.mark.parametrize(('odd', 'profile'), [({3}, 'default'), ({3, 7}, 'slow')])
def test_one_odd_call_of_ten_does_not_decide(odd, profile):
    check = ShadowCheck(Engine())
    for number in range(WINDOW):
        check.engine.off = 0.9 if number in odd else 0.01
        call(check, OPEN)
    assert call(check, OPEN).profile == profile


def test_a_new_episode_goes_one_step_forward_and_a_second_step_back_stays():
    check, seen = ShadowCheck(Engine(1.0)), []
    for _ in range(6):
        seen.append({(s.profile, s.mode) for s in (call(check, OPEN) for _ in range(4 * WINDOW))})
        check.begin_episode()
    default, slow, dense = ('default', 'full'), ('slow', 'full'), ('slow', 'dense')
    assert seen == [{default, slow, dense}, {slow, dense}, *[{dense}] * 4]


def test_a_better_scene_is_found_out_by_the_next_episode():
    check = ShadowCheck(Engine(1.0))
    for _ in range(WINDOW + 1):
        call(check, OPEN)
    assert call(check, OPEN).profile == 'slow'
    check.engine.off = 0.0
    assert call(check, OPEN).profile == 'slow'
    check.begin_episode()
    assert {call(check, OPEN).profile for _ in range(3 * WINDOW)} == {'default'} and check.problem == ''


def test_a_changed_setting_starts_anew_and_an_equal_one_does_not():
    check = ShadowCheck(Engine(1.0))
    for _ in range(3 * WINDOW):
        call(check, OPEN)
    assert call(check, replace(OPEN)).mode == 'dense'
    assert call(check, replace(OPEN, shadow_limit=2.0)).profile == 'default' and check.problem == ''


@pytest.mark.parametrize(('asked', 'then'), [('fast', 'default'), ('default', 'slow'), ('slow', 'dense')])
def test_the_next_more_careful_profile(asked, then):
    found = more_careful(Settings().with_values(profile=asked))
    assert then == ('dense' if found.mode == 'dense' else found.profile)


@pytest.mark.parametrize(('ratios', 'then'), [((0.2, 0.6), 'slow'), ((0.1, 0.1), 'fast'), ((0.6, 0.5), 'dense')])
def test_the_next_more_careful_profile_of_ratios_set_by_hand(ratios, then):
    settings = Settings().with_values(token_ratio=ratios[0], neuron_ratio=ratios[1])
    found = more_careful(settings)
    assert then == ('dense' if found.mode == 'dense' else found.profile)
    assert found.mode == 'dense' or all(p >= r for p, r in zip(PROFILES[then], ratios, strict=True))


def test_a_policy_measures_its_cached_calls_against_dense_ones(open_policy, look):
    policy, dense = open_policy(OPEN), open_policy(OPEN.with_values(mode='dense'))
    seen = [look(0, 0), look(1, 3)]
    first, second = run(policy, seen)
    expected = run(dense, seen)[1]
    assert (first.report.path, second.report.path) == ('dense', 'previous_call')
    difference = np.abs(second.actions - expected.actions)[:policy.execute_steps].mean()
    assert policy.status()['shadow_checks'] == 1 and difference > 0
    # The tiny policy's actions are normalised by -1 and 1, so the units are the same.
    assert policy.status()['shadow_difference'] == pytest.approx(difference, rel=1e-3)


def test_a_policy_with_bad_references_ends_up_dense_and_says_so(open_policy, look, monkeypatch):
    monkeypatch.setattr(shadow, 'WINDOW', 2)
    policy = open_policy(OPEN.with_values(shadow_limit=0.0))
    chunks = run(policy, [look(seed, 5 * seed) for seed in range(8)])
    assert [c.report.mode for c in chunks][-2:] == ['dense'] * 2 and len(policy.problems) == 1
    policy.reset_episode(PROMPT)
    assert policy.wait_ready(WAIT_S) and policy.infer(look()).report.mode == 'full'


def test_a_call_that_comes_during_a_check_gives_what_it_gives_without(open_policy, look, monkeypatch):
    scenes = [look(0, 0), look(1, 1), look(2, 2)]
    expected = run(open_policy(replace(OPEN, shadow_every=0)), scenes)
    policy, inside, go = open_policy(OPEN), threading.Event(), threading.Event()
    repeat = policy.engine.dense

    def repeat_slowly(embedded, checkpoint):
        def ask():
            inside.set()
            assert go.wait(WAIT_S)
            checkpoint()
        return repeat(embedded, ask)

    run(policy, scenes[:1])
    monkeypatch.setattr(policy.engine, 'dense', repeat_slowly)
    policy.infer(scenes[1])
    policy.chunk_published(float('inf'))
    assert inside.wait(WAIT_S)  # after the previous call's reference has been expanded
    chunk = policy.infer(scenes[2])
    go.set()
    assert np.array_equal(chunk.actions, expected[2].actions) and chunk.report.path == 'previous_call'
    assert policy.wait_ready(WAIT_S) and policy.status()['shadow_checks'] == 1  # the check went on after the call
