# SPDX-License-Identifier: Apache-2.0
"""The simulated cell: determinism, joint order, and agreement with gym-aloha's own environment."""

from __future__ import annotations

import numpy as np
import pytest

from rmuscle_core.errors import ObservationError


def test_the_seed_alone_decides_an_episode(cell):
    seen = []
    for seed in (3, 4, 3):
        cell.reset(seed)
        cell.step(cell.state() + 0.05)
        seen.append((cell.state(), cell.cube(), cell.images()))
    first, other, again = seen
    assert np.array_equal(first[0], again[0]) and np.array_equal(first[1], again[1])
    for camera, image in first[2].items():
        assert np.array_equal(image, again[2][camera])
        assert not np.array_equal(image, other[2][camera]), f'light and cube of another seed must change {camera}'
    assert not np.array_equal(first[1], other[1])


def test_images(cell):
    cell.reset(0)
    images = cell.images()
    assert list(images) == ['top', 'left_wrist', 'right_wrist']
    for image in images.values():
        assert image.shape == (64, 64, 3) and image.dtype == np.uint8
    red = images['top'].astype(int)
    assert ((red[..., 0] > 2 * red[..., 1]) & (red[..., 0] > 2 * red[..., 2])).any(), 'the cube is in the top view'


def test_the_cube_is_drawn_where_the_physics_has_it(cell):
    """The top view looks straight down: along x the picture and the table agree in direction."""
    columns, xs = [], []
    for seed in range(6):
        cell.reset(seed)
        top = cell.images()['top'].astype(int)
        red = (top[..., 0] > 2 * top[..., 1]) & (top[..., 0] > 2 * top[..., 2])
        columns.append(np.nonzero(red)[1].mean())
        xs.append(cell.cube()[0])
    assert np.corrcoef(columns, xs)[0, 1] > 0.99


def test_state_order_follows_the_joint_names(cell):
    from rmuscle_core.workcell.cell import JOINTS

    cell.reset(0)
    assert cell.state().shape == (len(JOINTS),) and cell.state().dtype == np.float32
    for index, name in enumerate(JOINTS):
        side, joint = name.split('_', 1)
        joint = 'left_finger' if joint == 'gripper' else joint
        before = cell.state()
        cell.data.joint(f'vx300s_{side}/{joint}').qpos[0] += 0.01
        assert np.flatnonzero(cell.state() != before).tolist() == [index], name


@pytest.mark.parametrize('index', [0, 5, 6, 7, 13])
def test_a_command_moves_the_joint_of_its_name(cell, index):
    cell.reset(0)
    start = cell.state()
    command = start.copy()
    command[index] += 0.3
    for _ in range(10):
        cell.step(command)
    moved = np.abs(cell.state() - start)
    assert moved.argmax() == index and moved[index] > 0.15


@pytest.mark.parametrize('command', [np.zeros(13), np.full(14, np.nan)])
def test_an_unusable_command_is_refused(cell, command):
    cell.reset(0)
    with pytest.raises(ObservationError, match='14 finite joint targets'):
        cell.step(command)


def test_physics_and_reward_are_those_of_gym_aloha(cell):
    """The same commands in dm_control's loop give the same positions and the same reward stages."""
    pytest.importorskip('dm_control', reason='only this comparison needs dm_control')
    from dm_control import mujoco
    from dm_control.rl import control
    from gym_aloha.constants import DT
    from gym_aloha.tasks import sim

    from rmuscle_core.workcell.cell import SCENE_FILE
    from rmuscle_core.workcell.expert import plan

    class Blind(sim.TransferCubeTask):
        def get_observation(self, physics):
            return {}

    cell.reset(0)
    sim.BOX_POSE[0] = cell.data.qpos[16:].copy()
    theirs = control.Environment(mujoco.Physics.from_xml_path(SCENE_FILE), Blind(), control_timestep=DT)
    theirs.reset()
    rewards = set()
    for command in plan(cell):
        done = cell.step(command)
        reward = [theirs.step(command).reward for _ in range(2)]
        rewards.add(cell.reward)
        if done:
            assert 4 in reward
            break
        assert cell.reward == reward[-1]
        np.testing.assert_allclose(cell.data.qpos, theirs.physics.data.qpos, atol=1e-9)
    assert done and rewards >= {0, 2, 4}
