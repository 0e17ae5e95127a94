# SPDX-License-Identifier: Apache-2.0
"""The one-arm cell: determinism, what its commands mean, its expert, and the demonstrations made with it."""

from __future__ import annotations

import numpy as np
import pytest

from rmuscle_core.errors import ObservationError
from rmuscle_core.workcell.tasks import TASKS


@pytest.fixture(scope='module')
def pick_place():
    pytest.importorskip('metaworld', reason='metaworld, the second task\'s simulator, is not installed')
    try:
        made = TASKS['pick_place'].make_cell(64)
    except Exception as error:  # noqa: BLE001 - every GL backend fails with a type of its own
        pytest.skip(f'no off-screen rendering on this machine ({error}); install libosmesa6')
    yield made
    made.close()


@pytest.fixture(scope='module')
def teacher(pick_place):
    return TASKS['pick_place'].make_teacher(pick_place)


def test_the_seed_alone_decides_an_episode(pick_place, teacher):
    seen = []
    for seed in (3, 4, 3):
        pick_place.reset(seed)
        pick_place.step(np.array([0.05, 0.65, 0.15, 0.2]))
        seen.append((pick_place.state(), teacher.landmarks(), pick_place.images()))
    first, other, again = seen
    assert np.array_equal(first[0], again[0]) and np.array_equal(first[1], again[1])
    assert list(first[2]) == ['front', 'side', 'wrist']
    for camera, image in first[2].items():
        assert image.shape == (64, 64, 3) and image.dtype == np.uint8
        assert np.array_equal(image, again[2][camera]) and not np.array_equal(image, other[2][camera])


def test_the_goal_is_drawn_where_it_is(pick_place):
    """Blue, further to the left of the front view the greater its x, and the higher the greater its z."""
    places, pixels = [], []
    for seed in range(8):
        pick_place.reset(seed)
        front = pick_place.images()['front'].astype(int)
        rows, columns = np.nonzero((front[..., 2] > 2 * front[..., 0]) & (front[..., 2] > 2 * front[..., 1]))
        places.append(pick_place.goal[[0, 2]])
        pixels.append([-columns.mean(), -rows.mean()])
    (x, z), (column, row) = np.transpose(places), np.transpose(pixels)
    assert np.corrcoef(x, column)[0, 1] > 0.98 and np.corrcoef(z, row)[0, 1] > 0.95


def test_the_puck_is_drawn_where_the_physics_has_it(pick_place, teacher):
    """Of two still frames that differ in the puck alone, the pictures differ where it was and where it is."""
    pick_place.reset(0)
    pose = teacher.pose()
    images = []
    for x in (-0.1, 0.1):
        pose[9] = x
        images.append(pick_place.scene.render(pose, goal=pick_place.goal)['front'].astype(int))
    changed = np.abs(images[0] - images[1]).max(2) > 30
    columns = np.flatnonzero(changed.any(0))
    assert 8 <= changed.sum() < 200 and columns.min() < 28 and columns.max() > 36


@pytest.mark.parametrize('axis', range(3))
def test_a_command_is_where_the_hand_goes(pick_place, axis):
    pick_place.reset(0)
    start = pick_place.state()
    command = start.copy()
    command[axis] += 0.08
    for _ in range(8):
        pick_place.step(command)
    moved = pick_place.state() - start
    assert abs(moved[axis] - 0.08) < 0.015 and np.abs(np.delete(moved[:3], axis)).max() < 0.015


def test_the_gripper_closes_at_zero_and_opens_at_one(pick_place):
    pick_place.reset(0)
    command, openings = pick_place.state(), []
    for opening in (0.0, 1.0):
        command[3] = opening
        for _ in range(10):
            pick_place.step(command)
        openings.append(pick_place.state()[3])
    assert openings[0] < 0.3 and openings[1] > 0.9


@pytest.mark.parametrize('command', [np.zeros(3), np.full(4, np.nan)])
def test_an_unusable_command_is_refused(pick_place, command):
    with pytest.raises(ObservationError, match='finite hand position and gripper opening'):
        pick_place.step(command)


@pytest.mark.parametrize('seed', [0, 5])
def test_the_expert_brings_the_puck_to_the_goal(pick_place, teacher, seed):
    pick_place.reset(seed)
    before = pick_place.state(), pick_place.puck(), pick_place.goal
    commands = teacher.plan()
    assert all(np.array_equal(a, b) for a, b in zip(before, (pick_place.state(), pick_place.puck(), pick_place.goal)))
    assert commands.shape == (84, 4) and commands.dtype == np.float32
    assert np.abs(np.diff(commands[:, :3], axis=0)).max() < 0.03
    done = [pick_place.step(command) for command in commands]
    assert any(done) and done.index(True) < pick_place.episode_steps
    assert np.linalg.norm(pick_place.puck() - pick_place.goal) < 0.04  # well inside the benchmark's 0.07


def test_still_frames_move_the_puck_only_when_it_lies(pick_place, teacher):
    pick_place.reset(0)
    pose, generator = teacher.pose(), np.random.default_rng(0)
    _, first = teacher.still(pose, generator)
    _, second = teacher.still(pose, generator)
    assert (first != second).all()
    pose[11] = 0.2
    _, held = teacher.still(pose, generator)
    np.testing.assert_allclose(held[:2], pose[9:11], atol=1e-6)


def test_demonstrations(pick_place, teacher):
    from rmuscle_core.workcell.demonstrations import record

    made = record(teacher, episodes=1, located=12, seed=0, every=20)
    assert made.images.shape[1:] == (3, 64, 64, 3) and len(made.images) == len(made.states) == len(made.landmarks)
    assert made.landmarks.shape[1] == 5 and made.located_landmarks.shape == (12, 5)
    assert made.commands.shape == (1, 84, 4) and made.joints.tolist() == list(pick_place.joints)
    assert made.seen_by(['side']).images.shape[1] == 1


def test_the_shipped_policy_fits_the_cell_and_looks(pick_place):
    """Its first commands bring the hand to the puck's side, for pucks that only the pictures tell apart."""
    from rmuscle_core.evaluation.commands import shipped_policy
    from rmuscle_core.observation import Observation
    from rmuscle_core.policy import MusclePolicy
    from rmuscle_core.settings import Settings
    from rmuscle_core.workcell.evaluate import check_fits

    policy = MusclePolicy.load(shipped_policy('pick_place'), Settings(mode='dense'))
    check_fits(policy, pick_place)
    pucks, reached = [], []
    for seed in range(1000, 1006):
        pick_place.reset(seed)
        images = {camera: image for camera, image in pick_place.images().items() if camera in policy.config.cameras}
        chunk = policy.infer(Observation(images, pick_place.state(), pick_place.task, 0.0))
        pucks.append(pick_place.puck()[0])
        reached.append(chunk.actions[-1, 0])
    policy.close()
    assert np.corrcoef(pucks, reached)[0, 1] > 0.95
