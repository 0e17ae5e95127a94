# SPDX-License-Identifier: Apache-2.0
"""The executed action foretells the next state, as long as that proves right."""

from types import SimpleNamespace

import numpy as np

from rmuscle_core.foresight import Foresight

PROCESSOR = SimpleNamespace(normalize_state=lambda x: np.asarray(x, np.float32) / 10)


def foresight(action_dim=2, state_dim=2):
    return Foresight(PROCESSOR, SimpleNamespace(action_dim=action_dim, state_dim=state_dim))


def test_the_prediction_is_the_action_in_the_state_s_units():
    assert foresight().expect(np.array([5.0, -5.0]), np.zeros(2)).tolist() == [0.5, -0.5]


def test_actions_of_another_size_tell_nothing():
    assert foresight(action_dim=7).expect(np.zeros(7), np.zeros(2)) is None


def test_actions_that_are_not_where_the_joints_go_lose_trust_and_can_regain_it():
    one, state = foresight(), np.array([0.1, 0.1], np.float32)
    assert one.expect(np.array([90.0, 90.0]), state) is not None
    one.observe(state)  # the robot stayed: the action meant something else
    assert one.expect(np.array([90.0, 90.0]), state) is None
    for _ in range(20):  # now it goes where the action says
        target = state + 0.3
        one.observe(state)
        one.expect(10 * target, state)
        state = target
    one.observe(state)
    assert one.expect(10 * state, state) is not None


def test_a_new_episode_is_not_held_against_the_prediction():
    one = foresight()
    one.expect(np.array([5.0, 5.0]), np.zeros(2, np.float32))
    one.forget()
    one.observe(np.full(2, -9.0, np.float32))
    assert one.expect(np.array([5.0, 5.0]), np.zeros(2)) is not None
