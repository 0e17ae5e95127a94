# SPDX-License-Identifier: Apache-2.0
"""Record the expert: disturbed episodes that succeeded, and still frames of cubes anywhere in reach."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rmuscle_core.workcell.cell import CAMERAS, CONTROL_RATE, CUBE_RANGE, JOINTS, TASK, WorkCell
from rmuscle_core.workcell.dataset import Demonstrations
from rmuscle_core.workcell.expert import plan

LAST_STEP = 104  # after it the hands only wait
_APPROACH = 46  # steps before the cube is moved: these arm poses go with any cube position
_DISTURBANCES = (0.0, 0.02, 0.04)  # radians, by turns
_RESTING_HEIGHT = 0.02  # metres, cube centre on the table
_CUBES_PER_LIGHT = 10


class Disturbance:
    """Slowly changing joint errors, so that the recordings show how to come back to the plan."""

    def __init__(self, generator: np.random.Generator, size: float):
        self._generator, self._size = generator, size
        self._offset = np.zeros(len(JOINTS))
        self._arms = np.array(['gripper' not in joint for joint in JOINTS])

    def apply(self, command: np.ndarray, step: int) -> np.ndarray:
        """Return the command with the current error added, less of it while a hand closes on the cube."""
        self._offset = 0.9 * self._offset + 0.43 * self._size * self._generator.normal(size=len(JOINTS))
        weight = 0.25 if 32 < step < 52 or step > 84 else 1.0
        return command + weight * self._arms * self._offset


def record_episode(cell: WorkCell, seed: int, disturbance: float, every: int, first: int) -> dict | None:
    """Run one episode; return its frames and commands, or None if it failed."""
    cell.reset(seed)
    commands = plan(cell)
    disturb = Disturbance(cell.generator, disturbance)
    frames, poses = [], []
    for step, command in enumerate(commands):
        if step % every == first and step < LAST_STEP:
            frames.append((np.stack(list(cell.images().values())), cell.state(), cell.cube(), step))
        if step < _APPROACH:
            poses.append((cell.data.qpos.copy(), cell.state()))
        if cell.step(disturb.apply(command, step)):
            return {'frames': frames, 'commands': commands, 'poses': poses}
    return None


def locate(cell: WorkCell, poses: list, count: int, generator: np.random.Generator) -> list[tuple]:
    """Still frames (images, state, cube): arms as recorded while approaching, the cube put anywhere in its range.

    No physics, so one costs a rendering only; a light serves several cubes, which also packs well.
    """
    frames = []
    for index in range(count):
        if index % _CUBES_PER_LIGHT == 0:
            cell.scene.relight(generator)
            positions, state = poses[generator.integers(len(poses))]
            positions = positions.copy()
        positions[16:19] = [*generator.uniform(*CUBE_RANGE), _RESTING_HEIGHT]
        positions[19:] = [1, 0, 0, 0]
        frames.append((np.stack(list(cell.scene.render(positions).values())), state, positions[16:19].copy()))
    return frames


def record(cell: WorkCell, episodes: int, located: int, seed: int, every: int = 3,
           progress: Callable[[int, int], None] = lambda done, tried: None) -> Demonstrations:
    """Record until ``episodes`` have succeeded, with a frame every ``every`` steps; then ``located`` still frames."""
    frames, owners, commands, poses = [], [], [], []
    tried = 0
    while len(commands) < episodes:
        episode = record_episode(cell, seed + tried, _DISTURBANCES[tried % 3], every, tried % every)
        tried += 1
        if episode is None:
            continue
        owners += [len(commands)] * len(episode['frames'])
        frames += episode['frames']
        poses += episode['poses']
        commands.append(episode['commands'])
        progress(len(commands), tried)
    images, states, cubes, steps = zip(*frames)
    located_images, located_states, located_cubes = zip(*locate(cell, poses, located, np.random.default_rng(seed)))
    return Demonstrations(
        cameras=np.array(CAMERAS), joints=np.array(JOINTS), control_rate=np.array(CONTROL_RATE), task=np.array(TASK),
        images=np.stack(images), states=np.stack(states), cubes=np.stack(cubes).astype(np.float32),
        episodes=np.array(owners, np.int32), steps=np.array(steps, np.int32), commands=np.stack(commands),
        located_images=np.stack(located_images), located_states=np.stack(located_states),
        located_cubes=np.stack(located_cubes).astype(np.float32))
