# SPDX-License-Identifier: Apache-2.0
"""Real-time chunking, the robot's side: what it still executes while the next chunk is computed, and how much of it.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from rmuscle_core.guard.trajectory import Trajectory, step_times

WINDOW = 8  # calls whose delay counts


def leftover_of(running: Trajectory | None, stamp_ns: int, rate_hz: float, horizon: int) -> np.ndarray | None:
    """What is commanded when the steps of a chunk observed at ``stamp_ns`` are due: float64 [n, A], robot units.

    n is the number of its first ``horizon`` steps that fall into the running trajectory; None when there is none, as
    the robot then stands still and a chunk is free to begin as it likes.
    """
    if running is None:
        return None
    due = stamp_ns + step_times(horizon, rate_hz)
    due = due[due <= running.end_ns]
    return running.at(due) if len(due) else None


class ConsumedSteps:
    """How many steps of the running chunk are executed while the next is computed, as measured in recent calls.

    What counts is what was executed, never a latency alone: a robot that stood still has consumed nothing. The first
    call of a run is slower than the others (lazy initialisation), so it counts until the second and no longer.
    """

    def __init__(self) -> None:
        self._first: int | None = None
        self._recent: deque[int] = deque(maxlen=WINDOW)

    @property
    def steps(self) -> int:
        """Expected of the next call: the most of the window."""
        return max(self._recent, default=self._first or 0)

    def note(self, steps: int) -> None:
        """A chunk arrived when this many of its steps were past."""
        if self._first is None:
            self._first = steps
        else:
            self._recent.append(steps)

    def restart(self) -> None:
        """The next call is the first of a run."""
        self._first = None
        self._recent.clear()
