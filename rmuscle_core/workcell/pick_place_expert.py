# SPDX-License-Identifier: Apache-2.0
"""Meta-World's scripted expert for pick-place, as a plan; and how it is recorded.

It sees the simulator's puck and goal positions (a policy does not).
"""

from __future__ import annotations

import warnings

import numpy as np
from metaworld.policies import SawyerPickPlaceV3Policy

from rmuscle_core.workcell.pick_place import REACH, PickPlaceCell

STEPS = 84  # control periods of a whole plan
HANG = 0.05  # metres from the hand down to a puck it holds
_LIFTED = 0.03  # metres, puck centre
_CALM = 3  # control periods around the grasp with little disturbance


def plan(cell: PickPlaceCell) -> np.ndarray:
    """Commands for the episode the cell was just reset to: float32 [STEPS, 4], one per control period.

    The expert answers to what happens, so it is run once; the cell is then reset to the same seed.
    """
    expert, commands = SawyerPickPlaceV3Policy(), []
    for _ in range(STEPS):
        seen = cell.observation.copy()
        seen[-1] += HANG  # the expert brings its hand to the goal; it is the puck that should be there
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')  # that its motion will be clipped
            *motion, effort = expert.get_action(seen)
        commands.append([*(cell.target() + REACH * np.clip(motion, -1, 1)), 1.0 - effort])
        cell.step(commands[-1])
    cell.reset(cell.seed)
    return np.array(commands, np.float32)


class PickPlaceTeacher:
    """Records the expert in its cell; see demonstrations.Teacher."""

    disturbances = (0.0, 0.006, 0.012)  # metres, by turns
    recorded_steps = pose_steps = 72

    def __init__(self, cell: PickPlaceCell):
        self.cell = cell

    def plan(self) -> np.ndarray:
        return plan(self.cell)

    def exposure(self, commands: np.ndarray) -> np.ndarray:
        """Little while the gripper closes, none of the gripper."""
        grasp = int(np.argmax(commands[:, 3] < 0.5))
        exposure = np.ones_like(commands)
        exposure[grasp - _CALM:grasp + 2 * _CALM] = 0.25
        exposure[:, 3] = 0
        return exposure

    def landmarks(self) -> np.ndarray:
        """Puck (x, y) and goal (x, y, z), metres, float32 [5]."""
        return np.concatenate([self.cell.puck()[:2], self.cell.goal]).astype(np.float32)

    def pose(self) -> np.ndarray:
        return self.cell.env.data.qpos.copy()

    def still(self, pose: np.ndarray, generator: np.random.Generator) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Images and landmarks of the arm in ``pose``, goal anywhere and puck anywhere unless it was in the hand."""
        places, pose = self.cell.place(generator), pose.copy()
        puck = pose[9:12]
        if puck[2] < _LIFTED:
            puck[:2] = places[:2]
        return self.cell.scene.render(pose, goal=places[3:]), np.concatenate([puck[:2], places[3:]]).astype(np.float32)
