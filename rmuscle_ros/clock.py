# SPDX-License-Identifier: Apache-2.0
"""The node clock: sim time before its first message, and time that moves backwards."""

from __future__ import annotations

from collections.abc import Callable

from rclpy.clock import ClockChange, JumpThreshold, TimeJump
from rclpy.duration import Duration
from rclpy.node import Node


class NodeClock:
    """Reads the node's clock; tells when time moved back (a bag that loops) or changed its source.

    ``moved_back(reason)`` is called on the executor thread.
    """

    def __init__(self, node: Node, moved_back: Callable[[str], None]):
        self._clock, self._moved_back = node.get_clock(), moved_back
        # The first jump of sim time, from zero to wherever the bag starts, is forward and of no interest.
        threshold = JumpThreshold(min_forward=None, min_backward=Duration(nanoseconds=-1), on_clock_change=True)
        self._watch = self._clock.create_jump_callback(threshold, post_callback=self._jumped)

    def now_ns(self) -> int:
        """Nanoseconds; 0 while sim time is used and no /clock message has come."""
        return self._clock.now().nanoseconds

    def close(self) -> None:
        """Stop watching."""
        self._watch.unregister()

    def _jumped(self, jump: TimeJump) -> None:
        if jump.clock_change in (ClockChange.ROS_TIME_ACTIVATED, ClockChange.ROS_TIME_DEACTIVATED):
            self._moved_back('clock source changed')
        elif jump.delta.nanoseconds < 0:
            self._moved_back(f'clock moved back by {-jump.delta.nanoseconds / 1e9:.2f} s')
