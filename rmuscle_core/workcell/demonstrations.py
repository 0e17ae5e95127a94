# SPDX-License-Identifier: Apache-2.0
"""Record an expert: disturbed episodes that succeeded, and still frames of what it handles anywhere in reach."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from rmuscle_core.workcell.dataset import Demonstrations
from rmuscle_core.workcell.tasks import Cell

_STILLS_PER_LIGHT = 10


class Teacher(Protocol):
    """A cell with its expert, and what there is to know for recording it. D landmark coordinates, A joints."""

    cell: Cell  # with ``generator``, drawn from the seed, and ``scene``
    disturbances: tuple[float, ...]  # standard deviations in a command's units, by turns
    recorded_steps: int  # after them the robot only waits
    pose_steps: int  # for these its poses go with landmarks anywhere

    def plan(self) -> np.ndarray:
        """Commands for the episode the cell was just reset to, float32 [N, A]."""

    def exposure(self, commands: np.ndarray) -> np.ndarray:
        """Share of the disturbance that each command of a plan bears, [N, A]."""

    def landmarks(self) -> np.ndarray:
        """What the policy has to see, metres, float32 [D]."""

    def pose(self) -> Any:
        """The present pose, as ``still`` takes it."""

    def still(self, pose: Any, generator: np.random.Generator) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Images and landmarks [D] with the robot in ``pose`` and landmarks drawn anew, without physics."""


class Disturbance:
    """Slowly changing errors of commands, so that the recordings show how to come back to the plan."""

    def __init__(self, generator: np.random.Generator, size: float, exposure: np.ndarray):
        self._generator, self._size, self._exposure = generator, size, exposure
        self._offset = np.zeros(exposure.shape[1])

    def apply(self, command: np.ndarray, step: int) -> np.ndarray:
        """Return the command with the current error added."""
        self._offset = 0.9 * self._offset + 0.43 * self._size * self._generator.normal(size=len(self._offset))
        return command + self._exposure[step] * self._offset


def record_episode(teacher: Teacher, seed: int, disturbance: float, every: int, first: int) -> dict | None:
    """Run one episode; return its frames and commands, or None if it failed."""
    cell = teacher.cell
    cell.reset(seed)
    commands = teacher.plan()
    disturb = Disturbance(cell.generator, disturbance, teacher.exposure(commands))
    frames, poses = [], []
    for step, command in enumerate(commands):
        if step % every == first and step < teacher.recorded_steps:
            frames.append((_stack(cell.images()), cell.state(), teacher.landmarks(), step))
        if step < teacher.pose_steps:
            poses.append((teacher.pose(), cell.state()))
        if cell.step(disturb.apply(command, step)):
            return {'frames': frames, 'commands': commands, 'poses': poses}
    return None


def locate(teacher: Teacher, poses: list, count: int, generator: np.random.Generator) -> list[tuple]:
    """Still frames (images, state, landmarks): the robot as recorded, the landmarks anywhere in their range.

    No physics, so one costs a rendering only; a light serves several of them, which also packs well.
    """
    frames = []
    for index in range(count):
        if index % _STILLS_PER_LIGHT == 0:
            teacher.cell.scene.relight(generator)
            pose, state = poses[generator.integers(len(poses))]
        images, landmarks = teacher.still(pose, generator)
        frames.append((_stack(images), state, landmarks))
    return frames


def record(teacher: Teacher, episodes: int, located: int, seed: int, every: int = 3,
           progress: Callable[[int, int], None] = lambda done, tried: None) -> Demonstrations:
    """Record until ``episodes`` have succeeded, with a frame every ``every`` steps; then ``located`` still frames."""
    frames, owners, commands, poses = [], [], [], []
    tried, sizes = 0, teacher.disturbances
    while len(commands) < episodes:
        episode = record_episode(teacher, seed + tried, sizes[tried % len(sizes)], every, tried % every)
        tried += 1
        if episode is None:
            continue
        owners += [len(commands)] * len(episode['frames'])
        frames += episode['frames']
        poses += episode['poses']
        commands.append(episode['commands'])
        progress(len(commands), tried)
    images, states, landmarks, steps = zip(*frames)
    located_frames = zip(*locate(teacher, poses, located, np.random.default_rng(seed)))
    located_images, located_states, located_landmarks = (np.stack(column) for column in located_frames)
    cell = teacher.cell
    return Demonstrations(
        cameras=np.array(cell.cameras), joints=np.array(cell.joints), control_rate=np.array(cell.control_rate),
        task=np.array(cell.task), images=np.stack(images), states=np.stack(states), landmarks=np.stack(landmarks),
        episodes=np.array(owners, np.int32), steps=np.array(steps, np.int32), commands=np.stack(commands),
        located_images=located_images, located_states=located_states, located_landmarks=located_landmarks)


def _stack(images: dict[str, np.ndarray]) -> np.ndarray:
    return np.stack(list(images.values()))
