# SPDX-License-Identifier: Apache-2.0
"""Units, ranges and polarity of joints, and robots whose first state is not in the checkpoint's units."""

from __future__ import annotations

import numpy as np
import pytest

from rmuscle_core.errors import SettingsError
from rmuscle_core.guard import plan_trajectory
from rmuscle_core.processing.normalize import Normalizer
from rmuscle_core.processing.units import unit_problem
from rmuscle_core.sensing.joints import JointMap

INFINITY = float('inf')
GRIPPER = {'lower': [-INFINITY, 0.0], 'upper': [INFINITY, 0.08], 'at_lower': [-INFINITY, 1.0],
           'at_upper': [INFINITY, 0.0]}  # metres; closed, 0.0, is 1 to the policy


def test_v17_gripper_range_and_polarity():
    joints = JointMap.build(('j1', 'gripper'), **GRIPPER)
    policy = np.array([[0.3, 0.0], [0.3, 1.0], [0.3, 0.25]])
    np.testing.assert_allclose(joints.to_robot(policy), [[0.3, 0.08], [0.3, 0.0], [0.3, 0.06]], atol=1e-12)
    assert joints.declared.tolist() == [False, True]
    assert 'gripper: robot = -0.08 * policy + 0.08' in joints.table() and '(assumed)' in joints.table().split('\n')[0]


def test_v17_beyond_the_range_is_clamped_and_counted():
    joints = JointMap.build(('j1', 'gripper'), **GRIPPER)
    actions = joints.to_robot(np.array([[0.0, 0.9], [0.0, 1.3], [0.0, 1.0]]))
    planned = plan_trajectory(actions, joints.names, stamp_ns=1, now_ns=1, rate_hz=20.0, execute_steps=3,
                              limits=joints.limits, measured=np.zeros(2))
    np.testing.assert_allclose(planned.trajectory.positions[:, 1], [0.008, 0.0, 0.0], atol=1e-12)
    assert planned.clamped == 1


@pytest.mark.parametrize('options', [
    GRIPPER, {'units': ['deg', 'same']}, {'scale': [np.pi / 180, -0.08], 'offset': [0.1, 0.08]},
    {'lower': [-3.1, 0.0], 'upper': [3.1, 0.7], 'at_lower': [-100.0, 255.0], 'at_upper': [100.0, 0.0]}])
def test_v17_state_path_is_the_exact_inverse(options):
    joints, robot = JointMap.build(('j1', 'gripper'), **options), np.random.default_rng(0).uniform(-4, 4, (100, 2))
    assert np.abs(joints.to_robot(joints.to_policy(robot)) - robot).max() < 1e-9


def test_v18_declared_degrees_are_converted_both_ways():
    joints = JointMap.build(('j1', 'j2'), units=['deg'])
    assert joints.to_policy(np.array([np.pi / 2, -np.pi]))[0] == pytest.approx(90)
    assert joints.to_robot([[90.0, 0.0]])[0, 0] == pytest.approx(1.5708, abs=1e-4)


@pytest.mark.parametrize(('options', 'words'), [
    ({'units': ['grad']}, 'joint_units must hold same, deg'),
    ({'units': ['deg', 'deg', 'deg']}, 'joint_units has 3 values'),
    ({'at_lower': [-INFINITY, 1.0]}, 'joint gripper: policy_at_lower'),
    ({**GRIPPER, 'upper': [INFINITY, INFINITY]}, 'finite joint_lower and joint_upper'),
    ({**GRIPPER, 'at_upper': [INFINITY, 1.0]}, 'to differ'),
    ({**GRIPPER, 'units': ['same', 'deg']}, 'one of the two'),
    ({**GRIPPER, 'offset': [0.0, 0.1]}, 'one of the two'),
    ({'step': [0.0]}, 'max_step must hold positive'), ({'jump': [-1.0]}, 'max_jump must hold positive')])
def test_contradictions_are_refused_by_name(options, words):
    with pytest.raises(SettingsError, match=words):
        JointMap.build(('j1', 'gripper'), **options)


NAMES, FREE = ('j1', 'j2', 'gripper'), np.zeros(3, bool)


def trained(low, high, mode='QUANTILES'):
    low, high = np.float32(low), np.float32(high)
    if mode == 'MEAN_STD':
        return Normalizer(mode, (low + high) / 2, (high - low) / 6)
    return Normalizer(mode, low, high)


@pytest.mark.parametrize('mode', ['QUANTILES', 'MIN_MAX', 'MEAN_STD'])
def test_v18_first_state_in_another_unit_is_refused(mode):
    degrees = trained([-120, -90, 0], [120, 90, 100], mode)
    said = unit_problem(np.array([0.5, -1.2, 0.3]), degrees, NAMES, FREE)
    assert 'looks like degrees' in said and 'j1' in said and 'joint_units' in said
    assert not unit_problem(np.array([28.6, -68.0, 17.0]), degrees, NAMES, FREE)
    radians = trained([-2.1, -1.6, 0], [2.1, 1.6, 1], mode)
    said = unit_problem(np.array([28.6, -68.0, 0.3]), radians, NAMES, FREE)
    assert 'joint j1 looks like degrees' in said and '28.6' in said
    assert not unit_problem(np.array([0.5, -1.2, 0.3]), radians, NAMES, FREE)
    assert 'another unit or another joint' in unit_problem(np.array([0.5, -1.2, 4.0]), radians, NAMES, FREE)


def test_v18_declared_units_are_not_questioned():
    degrees = trained([-120, -90, 0], [120, 90, 100])
    assert not unit_problem(np.array([0.0, 1.0, 0.0]), degrees, NAMES, ~FREE)
    radians = trained([-2.1, -1.6, 0], [2.1, 1.6, 1])
    assert not unit_problem(np.array([0.5, -1.2, 80.0]), radians, NAMES, np.array([False, False, True]))


def test_v18_what_is_no_sign_of_another_unit():
    percent_gripper = trained([-2.1, -1.6, 0], [2.1, 1.6, 100])
    assert not unit_problem(np.array([0.5, -1.2, 0.0]), percent_gripper, NAMES, FREE)
    still = trained([-2.1, 0.5, 0], [2.1, 0.5, 1])  # j2 never moved in training: any offset is many ranges
    assert not unit_problem(np.array([0.5, 0.6, 0.3]), still, NAMES, FREE)
    assert not unit_problem(np.array([0.5, 99.0, 0.3]), trained([0] * 3, [1] * 3, 'IDENTITY'), NAMES, FREE)


def test_joints_that_nothing_holds_to_a_speed_are_named():
    assert JointMap.build(['a', 'b'], step=[0.1, float('inf')]).unlimited() == ('b',)
    assert JointMap.build(['a', 'b']).unlimited() == ('a', 'b')
