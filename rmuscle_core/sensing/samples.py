# SPDX-License-Identifier: Apache-2.0
"""The latest sample of each source, and whether it is fit to be acted on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np

from rmuscle_core.errors import ObservationError

# How far a stamp may be ahead of the clock it is judged by: sim time arrives in steps. More is a clock of its own.
LEAD_NS = 100_000_000


def header_ns(message: Any, arrival_ns: int) -> int:
    """Header stamp in nanoseconds; a driver that leaves it zero is taken at its arrival."""
    stamp = message.header.stamp
    return int(stamp.sec) * 1_000_000_000 + int(stamp.nanosec) or arrival_ns


def age_problem(stamp_ns: int, arrival_ns: int, now_ns: int, max_age_ns: int) -> str:
    """What is wrong with a sample's age by stamp and by arrival, empty if nothing is."""
    if stamp_ns - now_ns > LEAD_NS:
        return f'is stamped {(stamp_ns - now_ns) / 1e9:.2f} s in the future; synchronise the clocks'
    age_ns = now_ns - min(stamp_ns, arrival_ns)
    return f'is {age_ns / 1e9:.2f} s old, max_age_s is {max_age_ns / 1e9:.2f}' if age_ns > max_age_ns else ''


@dataclass(frozen=True)
class Sample:
    """A message with its header stamp and its arrival, both in nanoseconds of the node clock."""

    message: Any
    stamp_ns: int
    arrival_ns: int


class CameraStream:
    """One camera: its latest frame, the last one that decoded with its picture, and counts.

    Locked by the buffer that owns it.
    """

    def __init__(self, topic: str):
        self.topic = topic
        self.frames = self.frames_bad = 0
        self.clear()

    def clear(self) -> None:
        """Forget the frames, not the counts."""
        self.latest: Sample | None = None
        self.good: Sample | None = None
        self.picture: np.ndarray | None = None

    def add(self, sample: Sample) -> None:
        """Replace the frame."""
        self.frames += 1
        self.latest = sample

    def drop(self, sample: Sample) -> None:
        """A frame does not decode: the one before it counts again, at its own age, unless a newer one came."""
        self.frames_bad += 1
        if self.latest is sample:
            self.latest = self.good


class JointSamples:
    """Position, stamp and arrival of each joint; several publishers may each send some of them at their own rate."""

    def __init__(self, names: Sequence[str], topic: str):
        self.names, self.topic = tuple(names), topic
        self.messages_bad = 0
        self._index = {name: i for i, name in enumerate(names)}
        self.clear()

    def clear(self) -> None:
        """Forget the positions, not the count."""
        self.positions = np.full(len(self.names), np.nan)  # [S] robot units
        self.stamps_ns = np.zeros(len(self.names), dtype=np.int64)
        self.arrivals_ns = np.zeros(len(self.names), dtype=np.int64)

    def check(self, message: Any) -> None:
        """Raise ObservationError if names and positions do not pair up, or a joint of ours is in it twice."""
        ours = [name for name in message.name if name in self._index]
        problem = ''
        if len(message.position) not in (0, len(message.name)):  # velocity- or effort-only messages are legal
            problem = f'{len(message.position)} positions for {len(message.name)} names'
        elif len(set(ours)) != len(ours):
            problem = f'joint {next(name for name in ours if ours.count(name) > 1)} twice'
        if problem:
            self.messages_bad += 1
            raise ObservationError(f'{self.topic}: {problem}; the message is dropped, check its publisher')

    def add(self, message: Any, arrival_ns: int) -> None:
        """Take over the joints of ours; a value that is not finite is passed over, its joint ages."""
        stamp_ns = header_ns(message, arrival_ns)
        for name, position in zip(message.name, message.position):
            i = self._index.get(name)
            if i is not None and isfinite(position):
                self.positions[i], self.stamps_ns[i], self.arrivals_ns[i] = position, stamp_ns, arrival_ns

    @property
    def missing(self) -> list[str]:
        """Joints of which no position has come."""
        return [name for name, known in zip(self.names, np.isfinite(self.positions)) if not known]

    def problem(self, now_ns: int, max_age_ns: int) -> str:
        """The first thing wrong with any joint, with its name; empty if nothing is."""
        if self.missing:
            return f'no position yet on {self.topic} for {", ".join(self.missing)}'
        for i in (int(self.stamps_ns.argmax()), int(np.minimum(self.stamps_ns, self.arrivals_ns).argmin())):
            problem = age_problem(int(self.stamps_ns[i]), int(self.arrivals_ns[i]), now_ns, max_age_ns)
            if problem:
                return f'joint {self.names[i]} on {self.topic} {problem}'
        return ''
