# SPDX-License-Identifier: Apache-2.0
"""Plays JointTrajectory messages in simulated time, as a joint_trajectory_controller would on a robot."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np
from builtin_interfaces.msg import Duration, Time
from trajectory_msgs.msg import JointTrajectory

from rmuscle_core.errors import ObservationError
from rmuscle_core.guard import Trajectory


def _nanoseconds(stamp: Time | Duration) -> int:
    return stamp.sec * 1_000_000_000 + stamp.nanosec


class TrajectoryPlayer:
    """The running trajectory; a new one replaces it at once.

    ``accept`` is called on the executor thread, everything else on the simulation's.
    """

    def __init__(self, joint_names: Sequence[str], period_ns: int):
        self._names, self._period_ns = tuple(joint_names), period_ns
        self._changed = threading.Condition()
        self._running: Trajectory | None = None
        self._not_before_ns = self._now_ns = 0

    def begin_episode(self, now_ns: int) -> None:
        """Drop the running trajectory, and every later one that answers an observation from before now."""
        with self._changed:
            self._running, self._not_before_ns, self._now_ns = None, now_ns, now_ns

    def accept(self, message: JointTrajectory) -> None:
        """Take a trajectory over. Raises ObservationError for joints that are not ours, all of them, and for points
        that a trajectory controller refuses.

        Simulated time stands still while no trajectory runs, so one that arrives late has missed nothing: it starts
        at its first point.
        """
        positions, times = self._points(message)
        stamp = _nanoseconds(message.header.stamp)
        with self._changed:
            if stamp and stamp < self._not_before_ns:
                return  # of the episode before
            stamp = stamp or self._now_ns
            if stamp + times[0] <= self._now_ns:
                stamp = self._now_ns + self._period_ns - int(times[0])
            self._running = Trajectory(self._names, stamp, times, positions)
            self._changed.notify()

    def _points(self, message: JointTrajectory) -> tuple[np.ndarray, np.ndarray]:
        """Positions [n, A] in our order of joints, and times int64 [n]."""
        if sorted(message.joint_names) != sorted(self._names) or not message.points:
            raise ObservationError(f'joint_trajectory: {len(message.points)} points for joints '
                                   f'{", ".join(message.joint_names)}; expected some for {", ".join(self._names)}')
        if any(len(point.positions) != len(self._names) for point in message.points):
            raise ObservationError(f'joint_trajectory: a point has not {len(self._names)} positions, one for each '
                                   'joint; check its publisher')
        order = [message.joint_names.index(name) for name in self._names]
        positions = np.array([point.positions for point in message.points])[:, order]
        times = np.array([_nanoseconds(point.time_from_start) for point in message.points])
        if not np.isfinite(positions).all() or (np.diff(times) <= 0).any():
            raise ObservationError('joint_trajectory: positions must be finite and times strictly increasing; check '
                                   'its publisher')
        return positions, times

    def wait(self, now_ns: int, timeout_s: float) -> bool:
        """Wait until a trajectory has points after now; False after the timeout."""
        with self._changed:
            self._now_ns = now_ns
            return self._changed.wait_for(lambda: self._running is not None and self._running.end_ns > now_ns,
                                          timeout_s)

    def command(self, time_ns: int) -> np.ndarray | None:
        """Target [A] for the control period that ends at an instant; None if the trajectory ends before."""
        with self._changed:
            running, self._now_ns = self._running, time_ns - self._period_ns
            return None if running is None or running.end_ns < time_ns else running.at(time_ns)


class Pace:
    """Keeps simulated periods at ``factor`` times real time; 0 runs as fast as it can."""

    def __init__(self, period_s: float, factor: float):
        self._period_s = period_s / factor if factor else 0.0
        self.restart()

    def restart(self) -> None:
        self._due = time.monotonic()

    def wait(self) -> None:
        """Sleep for the rest of the period."""
        self._due += self._period_s
        time.sleep(max(0.0, self._due - time.monotonic()))
