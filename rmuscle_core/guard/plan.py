# SPDX-License-Identifier: Apache-2.0
"""From a chunk to a trajectory: finite, in time, joined to the running command, within limits, never too fast."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rmuscle_core.guard.trajectory import ChunkRefused, Trajectory, check_trajectory, step_times

ROUNDING = 1e-9  # a value closer to a limit than this is at it


def _unlimited() -> np.ndarray:
    return np.array(np.inf)


@dataclass(frozen=True)
class Limits:
    """Per joint, float64 [A], robot units; infinite where there is none.

    jump: largest distance from the running command at which a chunk may start. step: largest change within one
    control period.
    """

    lower: np.ndarray
    upper: np.ndarray
    jump: np.ndarray
    step: np.ndarray = field(default_factory=_unlimited)


@dataclass(frozen=True)
class Planned:
    """A trajectory, and what it took to make it one.

    trimmed: steps left out because their time was past. clamped, capped: values held at a position limit, values
    held back because the joint would have moved too far in a period.
    """

    trajectory: Trajectory
    trimmed: int
    clamped: int
    capped: int


def plan_trajectory(actions: np.ndarray, joint_names: tuple[str, ...], *, stamp_ns: int, now_ns: int, rate_hz: float,
                    execute_steps: int, limits: Limits, measured: np.ndarray, previous: Trajectory | None = None,
                    blend_s: float = 0.0, velocities: bool = True) -> Planned:
    """Return the trajectory to send.

    actions: [H, A] robot units, step i due one period after step i - 1, the first one period after ``stamp_ns``.
    measured: [A] robot position at the observation, what the robot holds while there is no ``previous`` trajectory.

    Steps that are already past are left out, because the robot cannot be there any more; ``execute_steps`` are taken
    from the first that is not. The offset to the command that holds at that moment is faded out over ``blend_s``.
    A robot that stands beyond a position limit is led back to it, by no more than the largest step at a time.
    Raises ChunkRefused; a refused chunk is refused whole.
    """
    _check_finite(actions, joint_names)
    now_ns = max(now_ns, stamp_ns)  # simulated time may arrive after an observation that is stamped with it
    times, since_ns = step_times(len(actions), rate_hz), now_ns - stamp_ns
    first = int(np.searchsorted(times, since_ns, side='right'))
    if first == len(actions):
        raise ChunkRefused('expired', f'all {len(actions)} steps of the chunk were past when it was ready, '
                           f'{since_ns / 1e9:.2f} s after its observation; use a faster profile')
    times = times[first:first + execute_steps]
    positions = actions[first:first + execute_steps].astype(np.float64)
    ahead_s = (times - since_ns) / 1e9
    meets = measured if previous is None else previous.at(stamp_ns + int(times[0]))
    _check_jump(meets, positions[0], joint_names, limits)
    if blend_s:
        positions = positions + np.clip(1 - ahead_s / blend_s, 0, 1)[:, None] * (meets - positions[0])
    clamped = np.clip(positions, limits.lower, limits.upper)
    command = measured if previous is None else previous.at(now_ns)
    periods = np.diff(ahead_s, prepend=0.0)[:, None] * rate_hz
    capped = _cap(clamped, command, limits.step * np.minimum(periods, 1))
    _check_jump(meets, capped[0], joint_names, limits)  # a limit may lie far from where the robot stands
    trajectory = Trajectory(tuple(joint_names), stamp_ns, times, capped,
                            _velocities(capped, times) if velocities else None, since_ns, command)
    check_trajectory(trajectory, joint_names, now_ns)
    return Planned(trajectory, first, _changed(positions, clamped), _changed(clamped, capped))


def _changed(before: np.ndarray, after: np.ndarray) -> int:
    return int(np.count_nonzero(np.abs(after - before) > ROUNDING))


def _check_finite(actions: np.ndarray, joint_names: tuple[str, ...]) -> None:
    """Refuse a chunk [H, A] with any NaN or infinity, or with another number of joints."""
    if actions.ndim != 2 or actions.shape[1] != len(joint_names) or not len(actions):
        raise ChunkRefused('malformed', f'the policy returned actions of shape {actions.shape}, expected '
                           f'[steps, {len(joint_names)}] for joints {", ".join(joint_names)}; check joint_names')
    bad = np.argwhere(~np.isfinite(actions))
    if len(bad):
        step, joint = bad[0]
        raise ChunkRefused('nonfinite', f'action {actions[step, joint]} at step {step} of joint {joint_names[joint]} '
                           'is not finite; the whole chunk is dropped (check the checkpoint if this persists)')


def _check_jump(command: np.ndarray, first: np.ndarray, joint_names: tuple[str, ...], limits: Limits) -> None:
    """Refuse a chunk whose first position [A] is too far from the command [A] of that moment."""
    apart = np.abs(command - first)
    over = np.flatnonzero(apart > limits.jump)
    if len(over):
        joint = over[0]
        raise ChunkRefused('boundary', f'the chunk starts {apart[joint]:.3f} from the running command of joint '
                           f'{joint_names[joint]}, more than max_jump {limits.jump[joint]:.3f}; the robot holds')


def _cap(positions: np.ndarray, start: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Follow positions [n, A] from ``start`` [A] by at most steps [n, A] each; what is held back is made up later."""
    if np.isinf(steps).all():
        return positions
    followed = np.empty_like(positions)
    for i, target in enumerate(positions):
        start = followed[i] = np.clip(target, start - steps[i], start + steps[i])
    return followed


def _velocities(positions: np.ndarray, times_ns: np.ndarray) -> np.ndarray:
    """Central differences; the last is zero because the robot rests there until the next chunk."""
    if len(positions) == 1:
        return np.zeros_like(positions)
    velocities = np.gradient(positions, times_ns / 1e9, axis=0)
    velocities[-1] = 0.0
    return velocities
