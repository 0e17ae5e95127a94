# SPDX-License-Identifier: Apache-2.0
"""A robot that executes trajectories as a controller does, and objects to whatever a robot must not be sent.

It shares no code with the node: interpolation, acceptance and limits are its own.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[2] / 'test'))
from jtc_rules import rejection, seconds

JOINTS = tuple(f'{side}_{joint}' for side in ('left', 'right') for joint in (
    'waist', 'shoulder', 'elbow', 'forearm_roll', 'wrist_angle', 'wrist_rotate', 'gripper'))
HOME = (0.0, -0.96, 1.16, 0.0, -0.3, 0.0, 1.0) * 2
LIMIT = 1.8  # every joint, either way
STEP = 0.15  # largest change within a control period
SENSOR = 1e-4  # noise of the measured position
TOLERANCE = 1e-3
ON_THE_WAY_S = 0.25  # simulated, some tens of milliseconds of wall time: what a message may take to arrive
AHEAD_S = 1.0  # no trajectory of this node begins later than now


class Robot:
    """positions [S]: where it is. ``objections``: what was wrong with what came, one sentence each.

    accepted, holds: trajectories executed, and those of one point. late, excused: refused as a controller would,
    because they ended on the way here, or because the clock had just been set.
    """

    def __init__(self, rate_hz: float, seed: int) -> None:
        self._period_s, self._noise = 1.0 / rate_hz, np.random.default_rng(seed)
        self.positions = np.array(HOME)
        self.objections: list[str] = []
        self.accepted = self.holds = self.late = self.excused = 0
        self.largest_step = 0.0
        self._times, self._points = np.zeros(1), self.positions[None]
        self._allowed, self._unknown = STEP, False
        self._recent: deque[str] = deque(maxlen=4)  # trajectories, for an objection

    def receive(self, message: Any, now_s: float, excuse: bool) -> None:
        """Take a JointTrajectory over, or object. excuse: what is late or early now is the clock's fault, not the
        node's; it is refused and counted all the same.
        """
        start = seconds(message.header.stamp) or now_s
        reason = rejection(message, JOINTS, now_s)
        if start > now_s + AHEAD_S:
            reason = f'a trajectory begins {start - now_s:.2f} s ahead'
        if reason:
            end = start + seconds(message.points[-1].time_from_start) if message.points else start
            late = 'ends in the past' in reason and now_s - end < ON_THE_WAY_S
            self.late += late and not excuse
            self.excused += excuse
            self._unknown = True  # the node believes that this is executed, and joins the next one to it
            if not (excuse or late):
                self.objections.append(f'{reason} At {now_s:.2f}, its end is {end:.2f}')
            return
        points = np.array([point.positions for point in message.points])
        times = np.array([start + seconds(point.time_from_start) for point in message.points])
        self._inspect(message, points)
        past = int(np.searchsorted(times, now_s + 1e-6, side='right'))
        # The node left out what was past for it. What has passed on the way here are periods in which this trajectory
        # went one way and the robot, by the one before, perhaps the other. A hold does not say when it was sent.
        passed = 2 * past if seconds(message.header.stamp) else int(ON_THE_WAY_S / self._period_s)
        self._allowed = math.inf if self._unknown else self._allowed + passed * STEP
        self._unknown = False
        if past == len(times):  # to where it ends, then
            past, times = past - 1, times + (now_s + self._period_s - times[-1])
        self._times = np.concatenate([[now_s], times[past:]])
        self._points = np.concatenate([self.positions[None], points[past:]])
        self.accepted += 1
        self._recent.append(f'at {now_s:.2f}: stamp {start:.2f}, points {times[0]:.2f} to {times[-1]:.2f}')
        self.holds += len(message.points) == 1

    def _inspect(self, message: Any, points: np.ndarray) -> None:
        values = [*points.ravel(), *(v for point in message.points for v in point.velocities)]
        if not all(map(math.isfinite, values)):
            self.objections.append('a value is not finite')
        if np.abs(points).max() > LIMIT + TOLERANCE:
            self.objections.append(f'a position of {np.abs(points).max():.3f} is beyond the limit {LIMIT}')
        largest = np.abs(np.diff(points, axis=0)).max(initial=0.0)
        if largest > STEP + TOLERANCE:
            self.objections.append(f'a step of {largest:.3f} within a trajectory, allowed are {STEP}')

    def move(self, now_s: float) -> None:
        """Be where it is commanded to be now; called once a period."""
        before = self.positions
        self.positions = self._at(now_s)
        step = float(np.abs(self.positions - before).max())
        self.largest_step = max(self.largest_step, step if self._allowed < math.inf else 0.0)
        if step > self._allowed + TOLERANCE:
            self.objections.append(f'a step of {step:.3f} to {now_s:.2f}, allowed are {self._allowed:.3f}; '
                                   f'trajectories {"; ".join(self._recent)}')
        self._allowed = STEP

    def clock_set(self, now_s: float | None) -> None:
        """The clock leapt ahead to now: so does the robot, within its trajectory. None: it was set back, and the robot
        stays where it is.
        """
        if now_s is None:
            self._times, self._points = np.zeros(1), self.positions[None]
        else:
            self.positions = self._at(now_s)

    def _at(self, now_s: float) -> np.ndarray:
        return np.array([np.interp(now_s, self._times, column) for column in self._points.T])

    def idle(self, now_s: float) -> bool:
        """Nothing is left to execute."""
        return now_s >= self._times[-1] - 1e-6

    def measured(self) -> np.ndarray:
        return self.positions + self._noise.normal(scale=SENSOR, size=len(JOINTS))
