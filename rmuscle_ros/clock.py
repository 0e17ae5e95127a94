# SPDX-License-Identifier: Apache-2.0
"""The node clock: sim time before its first message, and time that does not pass evenly (a bag that loops, NTP)."""

from __future__ import annotations

import time
from collections.abc import Callable

from rclpy.clock import ClockChange, JumpThreshold, TimeJump
from rclpy.duration import Duration
from rclpy.node import Node

AHEAD_S = 2.0  # sim time that leaps this far was moved, not run; slow simulators tick in smaller steps
STEP_NS = 200_000_000  # system time that departs this far from the steady clock was set


class NodeClock:
    """Reads the node's clock; tells when time moved back (a bag that loops, a clock that is set) or changed its source,
    and when it leapt ahead.

    ``moved_back(reason)`` and ``moved_ahead(reason)`` are called on the executor thread.
    """

    def __init__(self, node: Node, moved_back: Callable[[str], None], moved_ahead: Callable[[str], None]):
        self._clock, self._moved_back, self._moved_ahead = node.get_clock(), moved_back, moved_ahead
        self._before_ns = 0  # the jump
        self._offset_ns: int | None = None  # of the system time to the steady clock
        threshold = JumpThreshold(min_forward=Duration(seconds=AHEAD_S), min_backward=Duration(nanoseconds=-1),
                                  on_clock_change=True)
        self._watch = self._clock.create_jump_callback(threshold, pre_callback=self._jumps, post_callback=self._jumped)

    def now_ns(self) -> int:
        """Nanoseconds; 0 while sim time is used and no /clock message has come."""
        return self._clock.now().nanoseconds

    def check(self) -> None:
        """Look whether somebody set the system time, which rcl does not report; to be called from a steady timer."""
        if self._clock.ros_time_is_active:
            self._offset_ns = None
            return
        before_ns, now_ns, after_ns = time.monotonic_ns(), self.now_ns(), time.monotonic_ns()
        if after_ns - before_ns > STEP_NS // 4:
            return  # this thread was held up between the readings
        offset_ns, self._offset_ns = self._offset_ns, now_ns - before_ns
        if offset_ns is not None and abs(self._offset_ns - offset_ns) > STEP_NS:
            self._moved((self._offset_ns - offset_ns) / 1e9)

    def _jumps(self) -> None:
        self._before_ns = self.now_ns()

    def _jumped(self, jump: TimeJump) -> None:
        if jump.clock_change in (ClockChange.ROS_TIME_ACTIVATED, ClockChange.ROS_TIME_DEACTIVATED):
            self._moved_back('clock source changed')
        elif self._before_ns:  # else it is the first /clock: from zero to wherever the bag starts
            self._moved(jump.delta.nanoseconds / 1e9)

    def _moved(self, seconds: float) -> None:
        if seconds < 0:
            self._moved_back(f'clock moved back by {-seconds:.2f} s')
        else:
            self._moved_ahead(f'clock leapt ahead by {seconds:.2f} s')
