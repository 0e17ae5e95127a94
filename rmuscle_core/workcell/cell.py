# SPDX-License-Identifier: Apache-2.0
"""The two-arm cell: gym-aloha's cube transfer (two ViperX 300 arms, one cube), commanded at 25 Hz in joint space.

Model, start pose, cube range and reward stages are gym-aloha's (Apache-2.0); the loop is MuJoCo's own, so that an
episode is a few thousand plain ``mj_step`` calls and depends on nothing but the seed.
"""

from __future__ import annotations

import mujoco
import numpy as np
from gym_aloha.constants import (
    ASSETS_DIR,
    START_ARM_POSE,
    normalize_puppet_gripper_position,
    unnormalize_puppet_gripper_position,
)

from rmuscle_core.errors import ObservationError
from rmuscle_core.workcell.scene import Scene, View

ARM_JOINTS = ('waist', 'shoulder', 'elbow', 'forearm_roll', 'wrist_angle', 'wrist_rotate')
JOINTS = tuple(f'{side}_{joint}' for side in ('left', 'right') for joint in (*ARM_JOINTS, 'gripper'))
CAMERAS = ('top', 'left_wrist', 'right_wrist')
CONTROL_RATE = 25.0  # Hz
TASK = 'transfer cube'
CUBE_RANGE = ((0.0, 0.4), (0.2, 0.6))  # metres, lowest and highest (x, y)
CUBE_START_HEIGHT = 0.05
SUCCESS = 4  # reward: 1 right hand touches, 2 lifted, 3 left hand touches, 4 left hand holds it off the table

SCENE_FILE = str(ASSETS_DIR / 'bimanual_viperx_transfer_cube.xml')
TOP_FIELD_OF_VIEW = 50.0  # degrees; the benchmark's 78 shows mostly floor at 64 pixels

__all__ = ['ARM_JOINTS', 'CAMERAS', 'CONTROL_RATE', 'CUBE_RANGE', 'JOINTS', 'SUCCESS', 'TASK', 'WorkCell']


def _narrow_the_top_view(spec: mujoco.MjSpec) -> None:
    spec.camera('top').fovy = TOP_FIELD_OF_VIEW


class WorkCell:
    """One simulated workstation.

    Joint order is JOINTS: radians, grippers normalised from 0 (closed) to 1 (open).
    """

    task, cameras, joints, control_rate = TASK, CAMERAS, JOINTS, CONTROL_RATE
    episode_steps = 150  # control periods, 6 s; the expert needs about 90

    def __init__(self, pixels: int = 64, seed: int = 0):
        self.model = mujoco.MjModel.from_xml_path(SCENE_FILE)
        self.data = mujoco.MjData(self.model)
        self.scene = Scene(View(SCENE_FILE, CAMERAS, (0.1, 0.45), _narrow_the_top_view), pixels)
        self._substeps = round(1.0 / CONTROL_RATE / self.model.opt.timestep)
        self._cube, self._table = self.model.geom('red_box').id, self.model.geom('table').id
        self._fingers = [self.model.geom(f'vx300s_{side}/10_{side}_gripper_finger').id for side in ('left', 'right')]
        self.reset(seed)

    def reset(self, seed: int) -> None:
        """Arms to the start pose; cube, lights and table colour drawn from ``seed`` alone."""
        self.generator = np.random.default_rng(seed)
        mujoco.mj_resetData(self.model, self.data)
        self.data.qpos[:16] = self.data.ctrl[:] = START_ARM_POSE
        self.data.qpos[16:] = [*self.generator.uniform(*CUBE_RANGE), CUBE_START_HEIGHT, 1, 0, 0, 0]
        self.scene.relight(self.generator)
        mujoco.mj_forward(self.model, self.data)
        self.reward = 0

    def state(self) -> np.ndarray:
        """Measured joint positions, float32 [14]."""
        left, right = self.data.qpos[:8], self.data.qpos[8:16]
        arms = [np.append(arm[:6], normalize_puppet_gripper_position(arm[6])) for arm in (left, right)]
        return np.concatenate(arms).astype(np.float32)

    def images(self) -> dict[str, np.ndarray]:
        """{camera: uint8 [pixels, pixels, 3] RGB}."""
        return self.scene.render(self.data.qpos)

    def cube(self) -> np.ndarray:
        """Cube centre, metres, float64 [3]."""
        return self.data.qpos[16:19].copy()

    def step(self, command: np.ndarray) -> bool:
        """Hold a joint target for one control period (40 ms); return whether the cube was handed over in it."""
        command = np.asarray(command, np.float64)
        if command.shape != (len(JOINTS),) or not np.isfinite(command).all():
            raise ObservationError(f'a command needs {len(JOINTS)} finite joint targets, not {command!r}; '
                                   'see rmuscle_core.workcell.cell.JOINTS for their order')
        for start, target in ((0, command[:7]), (8, command[7:])):
            finger = unnormalize_puppet_gripper_position(target[6])
            self.data.ctrl[start:start + 8] = [*target[:6], finger, -finger]
        for _ in range(2):  # the benchmark looks at contacts every 20 ms
            for _ in range(self._substeps // 2):
                # second half first: positions, contacts and commands then belong to the same instant
                mujoco.mj_step2(self.model, self.data)
                mujoco.mj_step1(self.model, self.data)
            self.reward = self._stage()
            if self.reward == SUCCESS:
                return True
        return False

    def _stage(self) -> int:
        pairs = {frozenset(pair) for pair in self.data.contact.geom.tolist()}
        left, right = (frozenset((self._cube, finger)) in pairs for finger in self._fingers)
        lifted = frozenset((self._cube, self._table)) not in pairs
        if left:
            return SUCCESS if lifted else 3
        return (2 if lifted else 1) if right else 0

    def close(self) -> None:
        """Free the renderer."""
        self.scene.close()
