# SPDX-License-Identifier: Apache-2.0
"""From streams of messages to one Observation: the latest sample of each, and only while all of them are fresh.

Nothing here needs a node: live use and offline replay hand the same messages to the same code.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rmuscle_core.errors import ObservationError
from rmuscle_core.observation import Observation
from rmuscle_core.sensing.image import decode_image
from rmuscle_core.sensing.joints import JointMap


@dataclass(frozen=True)
class Sample:
    """A message with its header stamp and its arrival, both in nanoseconds of the node clock."""

    message: Any
    stamp_ns: int
    arrival_ns: int


@dataclass(frozen=True)
class Snapshot:
    """An observation with what the trajectory needs of it: exact stamp and float64 [S] position in robot units."""

    observation: Observation
    stamp_ns: int
    measured: np.ndarray


class Stream:
    """One camera: its latest frame, the last one that decoded, and counts. Locked by the buffer that owns it."""

    def __init__(self, topic: str):
        self.topic = topic
        self.latest: Sample | None = None
        self.good: Sample | None = None
        self.frames = 0
        self.frames_bad = 0


def header_ns(message: Any, arrival_ns: int) -> int:
    """Header stamp in nanoseconds; a driver that leaves it zero is taken at its arrival."""
    stamp = message.header.stamp
    return stamp.sec * 1_000_000_000 + stamp.nanosec or arrival_ns


def assemble_observation(images: Mapping[str, np.ndarray], measured: np.ndarray, joints: JointMap, prompt: str,
                         stamp_ns: int) -> Observation:
    """Build the observation from decoded images and joint positions [S] in robot units."""
    return Observation(dict(images), joints.to_policy(measured).astype(np.float32), prompt, stamp_ns / 1e9)


class ObservationBuffer:
    """Latest sample per stream. Messages are added on the executor thread, snapshots are taken on the inference thread.

    The lock guards references only; frames are decoded outside it, on the thread that takes them.
    """

    def __init__(self, joints: JointMap, topics: Mapping[str, str], max_age_s: float):
        self.joints = joints
        self.streams = {camera: Stream(topic) for camera, topic in topics.items()}
        self.max_age_ns = round(max_age_s * 1e9)
        self.joint_messages_bad = 0
        self._index = {name: i for i, name in enumerate(joints.names)}
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Forget all samples: after a clock jump or an episode reset none of them counts."""
        count = len(self.joints.names)
        with self._lock:
            for stream in self.streams.values():
                stream.latest = stream.good = None
            self._positions = np.full(count, np.nan)
            self._stamps = np.zeros(count, dtype=np.int64)
            self._arrivals = np.zeros(count, dtype=np.int64)

    def add_image(self, camera: str, message: Any, now_ns: int) -> None:
        """Replace the camera's frame."""
        stream = self.streams[camera]
        with self._lock:
            stream.frames += 1
            stream.latest = Sample(message, header_ns(message, now_ns), now_ns)

    def add_joint_state(self, message: Any, now_ns: int) -> None:
        """Take over the joints of ours that the message names; several publishers may each send some of them.

        Values that are not finite are passed over: the joint keeps its old position and ages. Raises ObservationError
        if names and positions do not pair up.
        """
        if len(message.position) != len(message.name):
            if not len(message.position):
                return  # velocity- or effort-only messages are legal
            self.joint_messages_bad += 1
            raise ObservationError(f'joint_states: {len(message.position)} positions for {len(message.name)} names; '
                                   'the message is dropped, check its publisher')
        stamp_ns = header_ns(message, now_ns)
        with self._lock:
            for name, position in zip(message.name, message.position):
                index = self._index.get(name)
                if index is not None and np.isfinite(position):
                    self._positions[index], self._stamps[index], self._arrivals[index] = position, stamp_ns, now_ns

    def measured(self, now_ns: int) -> np.ndarray | None:
        """Current joint positions [S] in robot units, or None while any is missing or too old."""
        with self._lock:
            fresh = not self._joint_problem(now_ns, 0)
            return self._positions.copy() if fresh else None

    def problem(self, now_ns: int, not_before_ns: int = 0) -> str:
        """Why no observation can be taken now; empty if one can."""
        with self._lock:
            return self._problem(now_ns, not_before_ns)

    def take(self, prompt: str, now_ns: int, not_before_ns: int = 0) -> Snapshot | None:
        """Return a snapshot no stream of which is older than ``not_before_ns`` or max_age_s; None if there is none
        yet.

        Raises ObservationError for a frame that cannot be decoded; the frame before it then counts again, at its own
        age.
        """
        with self._lock:
            if self._problem(now_ns, not_before_ns):
                return None
            samples = {camera: stream.latest for camera, stream in self.streams.items()}
            measured, stamp_ns = self._positions.copy(), int(self._stamps.min())
        images = {camera: self._decode(self.streams[camera], sample) for camera, sample in samples.items()}
        return Snapshot(assemble_observation(images, measured, self.joints, prompt, stamp_ns), stamp_ns, measured)

    def age_s(self, camera: str | None, now_ns: int) -> float:
        """Age of a camera's frame, or of the oldest joint (None), in seconds; infinite before the first."""
        with self._lock:
            if camera is None:
                return (now_ns - int(self._stamps.min())) / 1e9 if np.isfinite(self._positions).all() else float('inf')
            latest = self.streams[camera].latest
            return (now_ns - latest.stamp_ns) / 1e9 if latest else float('inf')

    def _decode(self, stream: Stream, sample: Sample) -> np.ndarray:
        try:
            image = decode_image(sample.message, stream.topic)
        except ObservationError:
            with self._lock:
                stream.frames_bad += 1
                if stream.latest is sample:  # else a newer frame came meanwhile
                    stream.latest = stream.good
            raise
        stream.good = sample
        return image

    def _problem(self, now_ns: int, not_before_ns: int) -> str:
        for camera, stream in self.streams.items():
            if stream.latest is None:
                return f'no image yet for camera {camera} on {stream.topic}'
            problem = self._age_problem(stream.latest.stamp_ns, stream.latest.arrival_ns, now_ns, not_before_ns)
            if problem:
                return f'camera {camera} on {stream.topic} {problem}'
        return self._joint_problem(now_ns, not_before_ns)

    def _joint_problem(self, now_ns: int, not_before_ns: int) -> str:
        missing = np.flatnonzero(~np.isfinite(self._positions))
        if len(missing):
            return f'no position yet on joint_states for {", ".join(self.joints.names[i] for i in missing)}'
        oldest = int(self._stamps.argmin())
        problem = self._age_problem(int(self._stamps[oldest]), int(self._arrivals.min()), now_ns, not_before_ns)
        return f'joint {self.joints.names[oldest]} on joint_states {problem}' if problem else ''

    def _age_problem(self, stamp_ns: int, arrival_ns: int, now_ns: int, not_before_ns: int) -> str:
        if stamp_ns - now_ns > self.max_age_ns:
            return f'is stamped {(stamp_ns - now_ns) / 1e9:.2f} s in the future; synchronise the clocks'
        age_ns = now_ns - min(stamp_ns, arrival_ns)
        if age_ns > self.max_age_ns:
            return f'is {age_ns / 1e9:.2f} s old, max_age_s is {self.max_age_ns / 1e9:.2f}'
        return 'has not been seen since the end of the last chunk' if stamp_ns < not_before_ns else ''
