# SPDX-License-Identifier: Apache-2.0
"""What a robot executes, and the rules by which ros2_controllers' joint_trajectory_controller accepts it.

The rules: names, strictly increasing times, complete points, last velocity zero, end not in the past. It checks sizes
only, so that the values are finite is left to the sender and checked here too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rmuscle_core.errors import RMuscleError


class ChunkRefused(RMuscleError):
    """A chunk that must not move the robot; ``kind`` is nonfinite, expired, boundary or malformed."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Trajectory:
    """positions, velocities: float64 [n, A], robot units; times_ns: int64 [n] after stamp_ns, strictly increasing.

    start_ns, start: since when (after stamp_ns) and from where [A] the robot goes to the first point; None: unknown.
    """

    joint_names: tuple[str, ...]
    stamp_ns: int
    times_ns: np.ndarray
    positions: np.ndarray
    velocities: np.ndarray | None = None
    start_ns: int = 0
    start: np.ndarray | None = None

    @property
    def end_ns(self) -> int:
        return self.stamp_ns + int(self.times_ns[-1])

    def at(self, time_ns: int | np.ndarray) -> np.ndarray:
        """Position [A] (or [n, A]) commanded at an instant (or n): linear between start and points, held outside them.
        """
        since, times_ns, positions = np.asarray(time_ns) - self.stamp_ns, self.times_ns, self.positions
        if self.start is not None:
            times_ns, positions = np.r_[self.start_ns, times_ns], np.vstack([self.start, positions])
        return np.stack([np.interp(since, times_ns, column) for column in positions.T], axis=-1)


def step_times(steps: int, rate_hz: float) -> np.ndarray:
    """Nanoseconds int64 [steps] from the observation to each step; the first is one period after it."""
    return np.array([round((i + 1) * 1e9 / rate_hz) for i in range(steps)], dtype=np.int64)


def hold(joint_names: tuple[str, ...], position: np.ndarray, rate_hz: float) -> Trajectory:
    """One point at ``position`` [A]: how a trajectory controller is told to stop. Stamp 0 means "from now on"."""
    return Trajectory(tuple(joint_names), 0, step_times(1, rate_hz), position[None].astype(np.float64),
                      np.zeros((1, len(position))))


def check_trajectory(trajectory: Trajectory, joint_names: tuple[str, ...], now_ns: int) -> None:
    """Raise ChunkRefused('malformed') at the first rule of a trajectory controller that is broken."""
    count, joints = len(trajectory.times_ns), len(joint_names)
    arrays = {'positions': trajectory.positions, 'velocities': trajectory.velocities}
    present = {name: values for name, values in arrays.items() if values is not None}
    broken = None
    if not joints or tuple(trajectory.joint_names) != tuple(joint_names) or len(set(joint_names)) != joints:
        broken = f'joints {trajectory.joint_names}, expected {tuple(joint_names)}, each once'
    elif not count or trajectory.times_ns[0] <= 0 or np.any(np.diff(trajectory.times_ns) <= 0):
        broken = f'times {list(trajectory.times_ns[:3])} ns do not start above zero and increase strictly'
    elif trajectory.stamp_ns and trajectory.end_ns <= now_ns:
        broken = f'its end is {(now_ns - trajectory.end_ns) / 1e9:.3f} s in the past'
    for name, values in present.items():
        if broken is None and values.shape != (count, joints):
            broken = f'{name} have shape {values.shape}, expected {(count, joints)}'
        elif broken is None and not np.isfinite(values).all():
            broken = f'{name} hold a value that is not finite'
    if broken is None and trajectory.velocities is not None and np.any(trajectory.velocities[-1]):
        broken = 'the last velocity is not zero'
    if broken is not None:
        raise ChunkRefused('malformed', f'the trajectory is not fit to be sent: {broken}; it is dropped')
