# SPDX-License-Identifier: Apache-2.0
"""Last check before motion: a chunk of actions becomes a trajectory a robot may execute, or is refused.

The rules are those of ros2_controllers' joint_trajectory_controller (names, strictly increasing times, last velocity
zero, end not in the past), plus what it leaves to the sender: finite values, position limits, no jump at the chunk
boundary.
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
class Limits:
    """Per joint, float64 [A], robot units; infinite where there is none.

    ``jump`` bounds the step between two chunks.
    """

    lower: np.ndarray
    upper: np.ndarray
    jump: np.ndarray


@dataclass(frozen=True)
class Trajectory:
    """positions, velocities: float64 [n, A], robot units; times_ns: int64 [n] after stamp_ns, strictly increasing."""

    joint_names: tuple[str, ...]
    stamp_ns: int
    times_ns: np.ndarray
    positions: np.ndarray
    velocities: np.ndarray | None = None

    @property
    def end_ns(self) -> int:
        return self.stamp_ns + int(self.times_ns[-1])

    def at(self, time_ns: int) -> np.ndarray:
        """Position [A] commanded at an instant: linear between points, held outside them."""
        since = time_ns - self.stamp_ns
        return np.array([np.interp(since, self.times_ns, column) for column in self.positions.T])


def step_times(steps: int, rate_hz: float) -> np.ndarray:
    """Nanoseconds int64 [steps] from the observation to each step; the first is one period after it."""
    return np.array([round((i + 1) * 1e9 / rate_hz) for i in range(steps)], dtype=np.int64)


def check_finite(actions: np.ndarray, joint_names: tuple[str, ...]) -> None:
    """Refuse a chunk [H, A] with any NaN or infinity, or with another number of joints."""
    if actions.ndim != 2 or actions.shape[1] != len(joint_names) or not len(actions):
        raise ChunkRefused('malformed', f'the policy returned actions of shape {actions.shape}, expected '
                           f'[steps, {len(joint_names)}] for joints {", ".join(joint_names)}; check joint_names')
    bad = np.argwhere(~np.isfinite(actions))
    if len(bad):
        step, joint = bad[0]
        raise ChunkRefused('nonfinite', f'action {actions[step, joint]} at step {step} of joint {joint_names[joint]} '
                           'is not finite; the whole chunk is dropped (check the checkpoint if this persists)')


def plan_trajectory(actions: np.ndarray, joint_names: tuple[str, ...], *, stamp_ns: int, now_ns: int, rate_hz: float,
                    execute_steps: int, limits: Limits, measured: np.ndarray, previous: Trajectory | None = None,
                    blend_s: float = 0.0, velocities: bool = True) -> tuple[Trajectory, int]:
    """Return the trajectory to send and how many of its values were clamped to a limit.

    actions: [H, A] robot units, step i due one period after step i - 1, the first one period after ``stamp_ns``.
    measured: [A] robot position at the observation, what the robot holds while there is no ``previous`` trajectory.

    Steps that are already past are left out, because the robot cannot be there any more; ``execute_steps`` are taken
    from the first that is not. The offset to the command that holds at that moment is faded out over ``blend_s``.
    Raises ChunkRefused; a refused chunk is refused whole.
    """
    check_finite(actions, joint_names)
    times = step_times(len(actions), rate_hz)
    first = int(np.searchsorted(times, now_ns - stamp_ns, side='right'))
    if first == len(actions):
        raise ChunkRefused('expired', f'all {len(actions)} steps of the chunk were past when it was ready, '
                           f'{(now_ns - stamp_ns) / 1e9:.2f} s after its observation; use a faster profile')
    times = times[first:first + execute_steps]
    positions = actions[first:first + execute_steps].astype(np.float64)
    command = measured if previous is None else previous.at(stamp_ns + int(times[0]))
    positions = _join(positions, command, joint_names, limits, steps=max(1, round(blend_s * rate_hz)))
    clamped = np.clip(positions, limits.lower, limits.upper)
    trajectory = Trajectory(tuple(joint_names), stamp_ns, times, clamped,
                            _velocities(clamped, times) if velocities else None)
    check_trajectory(trajectory, joint_names, now_ns)
    return trajectory, int(np.count_nonzero(clamped != positions))


def _join(positions: np.ndarray, command: np.ndarray, joint_names: tuple[str, ...], limits: Limits,
          steps: int) -> np.ndarray:
    offset = command - positions[0]
    over = np.flatnonzero(np.abs(offset) > limits.jump)
    if len(over):
        joint = over[0]
        raise ChunkRefused('boundary', f'the chunk starts {abs(offset[joint]):.3f} from the running command of joint '
                           f'{joint_names[joint]}, more than max_jump {limits.jump[joint]:.3f}; the robot holds')
    weight = np.clip(1 - (np.arange(len(positions)) + 1) / steps, 0, 1)
    return positions + weight[:, None] * offset


def _velocities(positions: np.ndarray, times_ns: np.ndarray) -> np.ndarray:
    """Central differences; the last is zero because the robot rests there until the next chunk."""
    if len(positions) == 1:
        return np.zeros_like(positions)
    velocities = np.gradient(positions, times_ns / 1e9, axis=0)
    velocities[-1] = 0.0
    return velocities


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
