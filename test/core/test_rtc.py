# SPDX-License-Identifier: Apache-2.0
"""Real-time chunking from the running trajectory to the next chunk, and the delay it counts with."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest
from tiny_policy import JOINTS, WAIT_S, write_statistics

from rmuscle_core.errors import ObservationError
from rmuscle_core.guard import ConsumedSteps, Trajectory, leftover_of, step_times
from rmuscle_core.observation import Leftover
from rmuscle_core.settings import Settings

STAMP = 5_000_000_000
RTC = Settings(slots=4).with_values(rtc='exp')


def running(steps=8):
    positions = np.arange(1.0, steps + 1)[:, None] * [1.0, -1.0]
    return Trajectory(('a', 'b'), STAMP, step_times(steps, 20.0), positions)


def test_leftover_is_what_is_commanded_when_the_new_steps_are_due():
    found = leftover_of(running(), STAMP + 150_000_000, 20.0, 16)
    np.testing.assert_allclose(found, np.arange(4, 9)[:, None] * [1, -1])
    between = leftover_of(running(), STAMP + 175_000_000, 20.0, 16)  # observed between two steps
    np.testing.assert_allclose(between, np.arange(4.5, 8)[:, None] * [1, -1])
    assert len(leftover_of(running(), STAMP, 20.0, 3)) == 3


def test_a_robot_that_stands_still_leaves_nothing_over():
    assert leftover_of(None, STAMP, 20.0, 16) is None
    assert leftover_of(running(), STAMP + 400_000_000, 20.0, 16) is None
    assert leftover_of(running(), STAMP + 360_000_000, 20.0, 16) is None  # its end is before the first new step


def test_delay_is_the_most_of_recent_calls_and_the_first_is_forgotten():
    consumed = ConsumedSteps()
    assert consumed.steps == 0
    consumed.note(21)  # the slow first call
    assert consumed.steps == 21
    for steps in (2, 4, 3):
        consumed.note(steps)
    assert consumed.steps == 4
    for _ in range(8):
        consumed.note(2)
    assert consumed.steps == 2
    consumed.restart()
    assert consumed.steps == 0


def shifted(chunk, start):
    """The rest of a chunk, moved by 0.2: a running chunk that the policy on its own would not continue."""
    return Leftover(chunk.actions[start:] + np.float32(0.2), 2)


def test_chunk_continues_the_running_one(open_policy, look):
    """The first steps follow what is left over, the jump against them shrinks, and later steps are the policy's own."""
    policy = open_policy(RTC)
    free = policy.infer(look(1))
    leftover = shifted(free, 2)
    held = policy.infer(look(1), leftover)
    assert held.report.guided and not free.report.guided
    jump = np.abs(free.actions[:2] - leftover.actions[:2]).max()
    assert np.abs(held.actions[:2] - leftover.actions[:2]).max() < 0.25 * jump
    assert np.abs(held.actions[2] - leftover.actions[2]).max() < np.abs(free.actions[2] - leftover.actions[2]).max()
    np.testing.assert_array_equal(policy.infer(look(1)).actions, free.actions)


@pytest.mark.parametrize('schedule', ['exp', 'linear'])
def test_cached_calls_are_guided_too(open_policy, look, schedule):
    policy = open_policy(RTC.with_values(rtc=schedule))
    free = policy.infer(look(1))
    policy.chunk_published(float('inf'))
    assert policy.wait_ready(WAIT_S)
    leftover = shifted(free, 2)
    held = policy.infer(look(1), leftover)
    assert (held.report.path, held.report.guided) == ('previous_call', True)
    assert held.report.neurons_evaluated < held.report.neurons
    jump = np.abs(free.actions[:2] - leftover.actions[:2]).max()
    assert np.abs(held.actions[:2] - leftover.actions[:2]).max() < 0.3 * jump


def test_off_and_empty_leftovers_change_nothing(open_policy, look):
    policy = open_policy(Settings(slots=4))
    free = policy.infer(look(1))
    off = policy.infer(look(1), shifted(free, 2))
    assert not off.report.guided
    np.testing.assert_array_equal(off.actions, free.actions)
    policy.settings = RTC
    empty = policy.infer(look(1), Leftover(free.actions[:0], 0))
    assert not empty.report.guided
    np.testing.assert_array_equal(empty.actions, free.actions)


@pytest.mark.parametrize(('actions', 'executed'), [
    (np.full((3, JOINTS), np.nan), 1), (np.zeros((3, JOINTS + 1)), 1), (np.zeros(JOINTS), 1),
    (np.zeros((3, JOINTS)), -1)])
def test_leftover_of_another_robot_is_refused(open_policy, look, actions, executed):
    with pytest.raises(ObservationError, match='leftover'):
        open_policy(RTC).infer(look(1), Leftover(actions, executed))


def test_v16_leftover_of_relative_actions_is_held_where_it_was_meant(open_policy, look, tiny_checkpoint, tmp_path):
    """The robot moves by 0.2 between two calls: what is held are places, not what they were relative to."""
    checkpoint = shutil.copytree(tiny_checkpoint, tmp_path / 'relative')
    names = [f'j{i}' for i in range(1, JOINTS)] + ['gripper']
    write_statistics(checkpoint, relative_exclude=['gripper'], action_names=names)
    policy = open_policy(RTC, checkpoint=checkpoint)
    assert policy.relative_actions
    before = look(1)
    leftover = shifted(policy.infer(before), 2)
    after = replace(before, state=before.state + np.float32(0.2))
    free, held = policy.infer(after), policy.infer(after, leftover)
    jump = np.abs(free.actions[:2] - leftover.actions[:2]).max()
    assert np.abs(held.actions[:2] - leftover.actions[:2]).max() < 0.3 * jump
