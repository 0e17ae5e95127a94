# SPDX-License-Identifier: Apache-2.0
"""The one-arm cell: Meta-World's pick-place (a Sawyer arm, a puck, a goal in the air), commanded at 20 Hz.

Model, ranges, control and success are Meta-World's own environment (MIT licence, metaworld 3.1); its cameras show
little of the table at 64 pixels, so the cell has two of its own and the one in the hand.
"""

from __future__ import annotations

import pickle

import mujoco
import numpy as np
from metaworld.asset_path_utils import full_V3_path_for
from metaworld.envs.sawyer_pick_place_v3 import SawyerPickPlaceEnvV3
from metaworld.types import Task

from rmuscle_core.errors import ObservationError
from rmuscle_core.workcell.scene import TABLE, Scene, View

JOINTS = ('hand_x', 'hand_y', 'hand_z', 'gripper')
CAMERAS = ('front', 'side', 'wrist')
SUBSTEPS = 4  # environment steps of 12.5 ms in a control period
CONTROL_RATE = 20.0  # Hz
NEAREST_GOAL = 0.15  # metres on the table between puck and goal, as in the environment's own reset
REACH = 0.01  # metres an environment step moves the hand's target at most, along each axis
_FILE = full_V3_path_for('sawyer_xyz/sawyer_pick_place_v3.xml')


class PickPlaceCell:
    """One simulated workstation.

    State and command are in JOINTS' order: hand position in metres, gripper from 0 (closed) to 1 (open).
    """

    task, cameras, joints, control_rate = 'pick and place', CAMERAS, JOINTS, CONTROL_RATE
    episode_steps = 108  # control periods, 5.4 s; the expert needs about 65

    def __init__(self, pixels: int = 64, seed: int = 0):
        self.env = SawyerPickPlaceEnvV3()
        space = self.env._random_reset_space  # (puck, goal), the ranges of the benchmark
        self.ranges = space.low, space.high
        self.scene = Scene(View(_FILE, CAMERAS, (0.5, 1.0), _add_cameras), pixels)
        self.reset(seed)

    def reset(self, seed: int) -> None:
        """Hand to the start pose; puck, goal, lights and table colour drawn from ``seed`` alone."""
        self.seed, self.generator = seed, np.random.default_rng(seed)
        draw = {'env_cls': type(self.env), 'rand_vec': self.place(), 'partially_observable': False}
        self.env.set_task(Task('pick-place-v3', pickle.dumps(draw)))
        self.observation, _ = self.env.reset()
        self.goal = draw['rand_vec'][3:]
        self.scene.relight(self.generator)

    def place(self, generator: np.random.Generator | None = None) -> np.ndarray:
        """Draw where the puck and the goal are, metres, float64 [6]."""
        while True:
            places = (generator or self.generator).uniform(*self.ranges)
            if np.linalg.norm(places[:2] - places[3:5]) >= NEAREST_GOAL:
                return places

    def state(self) -> np.ndarray:
        """Measured hand position and gripper opening, float32 [4]."""
        return self.observation[:4].astype(np.float32)

    def images(self) -> dict[str, np.ndarray]:
        """{camera: uint8 [pixels, pixels, 3] RGB}."""
        return self.scene.render(self.env.data.qpos, goal=self.goal)

    def puck(self) -> np.ndarray:
        """Puck centre, metres, float64 [3]."""
        return self.observation[4:7].copy()

    def target(self) -> np.ndarray:
        """Where the hand is being drawn to, metres, float64 [3]."""
        return self.env.data.mocap_pos[0].copy()

    def step(self, command: np.ndarray) -> bool:
        """Move the hand's target for one control period (50 ms); return whether the puck came to the goal in it."""
        command = np.asarray(command, np.float64)
        if command.shape != (len(JOINTS),) or not np.isfinite(command).all():
            raise ObservationError(f'a command needs a finite hand position and gripper opening, not {command!r}; '
                                   'see rmuscle_core.workcell.pick_place.JOINTS for their order')
        effort = 1.0 - 2.0 * command[3]
        success = False
        for left in range(SUBSTEPS, 0, -1):
            motion = (command[:3] - self.target()) / left / REACH
            action = np.clip([*motion, effort], -1, 1).astype(np.float32)
            self.observation, *_, info = self.env.step(action)
            success |= bool(info['success'])
        return success

    def close(self) -> None:
        """Free the renderer."""
        self.scene.close()
        self.env.close()


def _add_cameras(spec: mujoco.MjSpec) -> None:
    spec.body('tablelink').geoms[0].name = TABLE
    spec.camera('gripperPOV').name = 'wrist'
    for name, position, aim, fovy in (('front', [0, 1.6, 0.5], [0, 0.74, 0.13], 28),
                                      ('side', [0.9, 0.72, 0.35], [0, 0.74, 0.14], 32)):
        backwards = np.subtract(position, aim) / np.linalg.norm(np.subtract(position, aim))
        right = np.cross([0, 0, 1], backwards)
        right /= np.linalg.norm(right)
        spec.worldbody.add_camera(name=name, pos=position, fovy=fovy,
                                  xyaxes=[*right, *np.cross(backwards, right)])
