# SPDX-License-Identifier: Apache-2.0
"""The scripted expert: keyframes of both hands, followed with damped-least-squares inverse kinematics.

It sees the simulator's cube position (a policy does not): the right arm picks the cube up, the left arm takes it over.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import mujoco
import numpy as np
from gym_aloha.constants import START_ARM_POSE

from rmuscle_core.workcell.cell import ARM_JOINTS, CUBE_RANGE, JOINTS, WorkCell

TIP = 0.125  # metres from the gripper link to between the fingertips
STEPS = 120  # control periods of a whole plan
OPEN, CLOSED = 1.0, 0.0
RESTING_HEIGHT = 0.02  # metres, cube centre on the table
_ROTATION_WEIGHT = 0.3  # metres per radian
_DAMPING = 1e-4
_MAX_JOINT_STEP = 0.2  # radians per iteration


class Pose(NamedTuple):
    """Where a hand is: fingertip position [3] in metres, rotation matrix [3, 3], gripper command."""

    position: np.ndarray
    rotation: np.ndarray
    gripper: float


class Keyframe(NamedTuple):
    """Both hands at one control step."""

    step: int
    left: Pose
    right: Pose


class Arm:
    """Kinematics of one arm on private simulation data."""

    def __init__(self, model: mujoco.MjModel, side: str):
        joints = [model.joint(f'vx300s_{side}/{name}') for name in ARM_JOINTS]
        self._model, self._data = model, mujoco.MjData(model)
        self._positions = [joint.qposadr[0] for joint in joints]
        self._velocities = [joint.dofadr[0] for joint in joints]
        self._limits = np.array([joint.range for joint in joints]).T
        self._gripper = model.body(f'vx300s_{side}/gripper_link').id

    def hand(self, joints: np.ndarray) -> Pose:
        """Forward kinematics of six joint angles; the gripper counts as closed, as in the start pose."""
        self._data.qpos[self._positions] = joints
        mujoco.mj_kinematics(self._model, self._data)
        mujoco.mj_comPos(self._model, self._data)
        rotation = self._data.xmat[self._gripper].reshape(3, 3).copy()
        return Pose(self._data.xpos[self._gripper] + rotation @ [TIP, 0, 0], rotation, CLOSED)

    def reach(self, joints: np.ndarray, target: Pose, iterations: int = 12) -> np.ndarray:
        """Six joint angles that bring the hand towards ``target``, starting from ``joints``, within the limits."""
        translation, rotation = np.zeros((2, 3, self._model.nv))
        for _ in range(iterations):
            hand = self.hand(joints)
            turn = _rotation_vector(target.rotation @ hand.rotation.T)
            error = np.concatenate([target.position - hand.position, _ROTATION_WEIGHT * turn])
            if np.linalg.norm(error) < 1e-4:
                break
            mujoco.mj_jac(self._model, self._data, translation, rotation, hand.position, self._gripper)
            jacobian = np.vstack([translation, _ROTATION_WEIGHT * rotation])[:, self._velocities]
            change = jacobian.T @ np.linalg.solve(jacobian @ jacobian.T + _DAMPING * np.eye(6), error)
            joints = np.clip(joints + np.clip(change, -_MAX_JOINT_STEP, _MAX_JOINT_STEP), *self._limits)
        return joints


def _rotation_vector(rotation: np.ndarray) -> np.ndarray:
    quaternion, vector = np.zeros(4), np.zeros(3)
    mujoco.mju_mat2Quat(quaternion, rotation.ravel())
    mujoco.mju_quat2Vel(vector, quaternion, 1.0)
    return vector


def _between(start: Pose, end: Pose, share: float) -> Pose:
    """Interpolate along the straight line and the shortest turn; the gripper switches at once."""
    vector = _rotation_vector(end.rotation @ start.rotation.T)
    angle = np.linalg.norm(vector)
    rotation = start.rotation
    if angle > 1e-8:
        quaternion, turn = np.zeros(4), np.zeros(9)
        mujoco.mju_axisAngle2Quat(quaternion, vector / angle, angle * share)
        mujoco.mju_quat2Mat(turn, quaternion)
        rotation = turn.reshape(3, 3) @ start.rotation
    return Pose(start.position + (end.position - start.position) * share, rotation, end.gripper)


def _axes(forward: list[float], up: list[float]) -> np.ndarray:
    """Rotation whose x axis points ``forward`` and whose z axis is as near to ``up`` as possible."""
    x = np.array(forward, float) / np.linalg.norm(forward)
    z = np.array(up, float) - x * (x @ up)
    z /= np.linalg.norm(z)
    return np.stack([x, np.cross(z, x), z], axis=1)


def keyframes(cube: np.ndarray, left: Pose, right: Pose) -> list[Keyframe]:
    """The transfer for a cube at ``cube`` [3], from the hands' start poses."""
    down, leftwards = _axes([-0.5, 0, -0.87], [-0.87, 0, 0.5]), _axes([-1, 0, 0], [0, 0, 1])
    rightwards = _axes([1, 0, 0], [0, 1, 0])
    grasp = np.array([cube[0], cube[1], 0.02])
    meet = np.array([0.0, 0.5, 0.25])
    beside, around = meet + [-0.12, 0, -0.02], meet + [-0.005, 0, -0.02]
    held = Pose(meet, leftwards, CLOSED)
    return [
        Keyframe(0, left, right),
        Keyframe(25, left, Pose(grasp + [0.02, 0, 0.10], down, OPEN)),
        Keyframe(40, left, Pose(grasp, down, OPEN)),
        Keyframe(48, left, Pose(grasp, down, CLOSED)),
        Keyframe(76, Pose(beside, rightwards, OPEN), held),
        Keyframe(92, Pose(around, rightwards, OPEN), held),
        Keyframe(102, Pose(around, rightwards, CLOSED), held),
        Keyframe(STEPS, Pose(around, rightwards, CLOSED), held),
    ]


def plan(cell: WorkCell) -> np.ndarray:
    """Commands for the episode the cell was just reset to: float32 [STEPS, 14], one per control period."""
    arms = Arm(cell.model, 'left'), Arm(cell.model, 'right')
    joints = [np.array(START_ARM_POSE[:6])] * 2
    frames = keyframes(cell.cube(), *(arm.hand(q) for arm, q in zip(arms, joints)))
    commands = []
    for start, end in pairwise(frames):
        for step in range(start.step, end.step):
            share = (step - start.step + 1) / (end.step - start.step)
            share *= share * (3 - 2 * share)  # at rest at every keyframe
            targets = _between(start.left, end.left, share), _between(start.right, end.right, share)
            joints = [arm.reach(q, target) for arm, q, target in zip(arms, joints, targets)]
            commands.append(np.concatenate([[*q, target.gripper] for q, target in zip(joints, targets)]))
    return np.array(commands, np.float32)


class TransferTeacher:
    """Records the expert in its cell; see demonstrations.Teacher."""

    disturbances = (0.0, 0.02, 0.04)  # radians, by turns
    recorded_steps = 104
    pose_steps = 46  # then the cube is moved

    def __init__(self, cell: WorkCell):
        self.cell = cell

    def plan(self) -> np.ndarray:
        return plan(self.cell)

    def exposure(self, commands: np.ndarray) -> np.ndarray:
        """Less while a hand closes on the cube, none of the grippers."""
        step = np.arange(len(commands))[:, None]
        arms = np.array(['gripper' not in joint for joint in JOINTS])
        return np.where(((step > 32) & (step < 52)) | (step > 84), 0.25, 1.0) * arms

    def landmarks(self) -> np.ndarray:
        """Cube (x, y), metres, float32 [2]."""
        return self.cell.cube()[:2].astype(np.float32)

    def pose(self) -> np.ndarray:
        return self.cell.data.qpos.copy()

    def still(self, pose: np.ndarray, generator: np.random.Generator) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Images and landmarks of the arms in ``pose`` and a cube anywhere on the table."""
        cube = generator.uniform(*CUBE_RANGE)
        positions = np.concatenate([pose[:16], cube, [RESTING_HEIGHT, 1, 0, 0, 0]])
        return self.cell.scene.render(positions), cube.astype(np.float32)
