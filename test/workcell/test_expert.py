# SPDX-License-Identifier: Apache-2.0
"""The scripted expert and the demonstrations made with it."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.fixture(scope='module')
def expert(cell):
    from rmuscle_core.workcell import expert
    return expert


@pytest.mark.parametrize('seed', [0, 5])
def test_the_expert_hands_the_cube_over(cell, expert, seed):
    cell.reset(seed)
    commands = expert.plan(cell)
    assert commands.shape == (expert.STEPS, 14) and commands.dtype == np.float32
    assert any(cell.step(command) for command in commands)


def test_the_plan_stays_in_the_joint_ranges_and_moves_smoothly(cell, expert):
    cell.reset(1)
    commands = expert.plan(cell)
    arms = [i for i in range(14) if i not in (6, 13)]
    limits = np.array([cell.model.joint(f'vx300s_{side}/{name}').range for side in ('left', 'right')
                       for name in expert.ARM_JOINTS])
    assert (commands[:, arms] >= limits[:, 0]).all() and (commands[:, arms] <= limits[:, 1]).all()
    assert np.abs(np.diff(commands[:, arms], axis=0)).max() < 0.4
    assert set(np.unique(commands[:, [6, 13]])) == {0.0, 1.0}


def test_inverse_kinematics_returns_to_a_pose_it_came_from(cell, expert):
    arm = expert.Arm(cell.model, 'right')
    joints = np.array([0.2, -0.6, 0.9, 0.1, 0.3, -0.2])
    target = arm.hand(joints)
    reached = arm.hand(arm.reach(joints + 0.15, target, iterations=50))
    np.testing.assert_allclose(reached.position, target.position, atol=1e-3)
    np.testing.assert_allclose(reached.rotation, target.rotation, atol=2e-2)


def test_demonstrations(cell, expert):
    from rmuscle_core.workcell.demonstrations import record

    teacher = expert.TransferTeacher(cell)
    made = record(teacher, episodes=2, located=12, seed=0, every=20)
    assert made.images.shape[1:] == (3, 64, 64, 3) and len(made.images) == len(made.states) == len(made.steps)
    assert made.commands.shape[0] == 2 and set(made.episodes) == {0, 1} and made.steps.max() < teacher.recorded_steps
    # the commands stored are the plan: the first frame's chunk starts at the start pose
    assert np.abs(made.chunks(4)[0, 0, :6] - made.states[0, :6]).max() < 0.05
    # one light and arm pose serves ten cubes, then another one
    assert (made.located_states[:10] == made.located_states[0]).all()
    assert made.located_landmarks.shape == (12, 2) and len(np.unique(made.located_landmarks[:, 0])) == 12
