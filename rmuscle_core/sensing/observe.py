# SPDX-License-Identifier: Apache-2.0
"""From streams of messages to one Observation: the latest sample of each, and only while all of them are fresh.

Nothing here needs ROS: a node and a bag reader hand the same messages to the same code,

    buffer = ObservationBuffer(joints, {'base': '/cam0/image_raw'}, max_age_s=0.5)
    for connection, time_ns, raw in reader.messages():            # rosbags
        if buffer.add(connection.topic, reader.deserialize(raw, connection.msgtype), time_ns):
            snapshot = buffer.take('lift the cube', time_ns)      # None until every source has a fresh sample
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rmuscle_core.errors import ObservationError
from rmuscle_core.observation import Observation
from rmuscle_core.sensing.image import Converter, decode_image
from rmuscle_core.sensing.joints import JointMap
from rmuscle_core.sensing.samples import CameraStream, JointSamples, Sample, age_problem, header_ns

INFINITY = float('inf')


@dataclass(frozen=True)
class Snapshot:
    """An observation with what the trajectory needs of it: exact stamp and float64 [S] position in robot units.

    The stamp is that of the oldest joint position: where the robot was is what a chunk starts from.
    """

    observation: Observation
    stamp_ns: int
    measured: np.ndarray


class ObservationBuffer:
    """Latest sample per source. Messages are added on the executor thread, snapshots are taken on the inference thread.

    The lock guards references only; frames are decoded outside it, on the thread that takes them, and each at most
    once. max_age_s and max_skew_s (0: any) may be changed at any time.
    """

    def __init__(self, joints: JointMap, topics: Mapping[str, str], max_age_s: float, max_skew_s: float = 0.0,
                 joint_topic: str = 'joint_states', other_encodings: Converter | None = None):
        self.joints = joints
        self.streams = {camera: CameraStream(topic) for camera, topic in topics.items()}
        self.samples = JointSamples(joints.names, joint_topic)
        self._other_encodings = other_encodings
        self.limit(max_age_s, max_skew_s)
        self._lock = threading.Lock()
        self._cleared = 0

    def limit(self, max_age_s: float, max_skew_s: float) -> None:
        """Seconds a sample may be old, and two may be apart (0: any)."""
        self.max_age_ns, self.max_skew_ns = round(max_age_s * 1e9), round(max_skew_s * 1e9)

    def clear(self) -> None:
        """Forget all samples: after a clock jump or an episode reset none of them counts."""
        with self._lock:
            self._cleared += 1
            self.samples.clear()
            for stream in self.streams.values():
                stream.clear()

    def add(self, topic: str, message: Any, now_ns: int) -> bool:
        """Add a message by its topic; False if the topic is not one of ours."""
        cameras = [camera for camera, stream in self.streams.items() if stream.topic == topic]
        for camera in cameras:
            self.add_image(camera, message, now_ns)
        if topic == self.samples.topic:
            self.add_joint_state(message, now_ns)
        return bool(cameras) or topic == self.samples.topic

    def add_image(self, camera: str, message: Any, now_ns: int) -> None:
        """Replace the camera's frame by a sensor_msgs Image or CompressedImage that arrived now."""
        sample = Sample(message, header_ns(message, now_ns), now_ns)
        with self._lock:
            self.streams[camera].add(sample)

    def add_joint_state(self, message: Any, now_ns: int) -> None:
        """Take over the joints of ours that a sensor_msgs JointState names.

        Values that are not finite are passed over: the joint keeps its old position and ages. Raises ObservationError
        if names and positions do not pair up.
        """
        self.samples.check(message)
        with self._lock:
            self.samples.add(message, now_ns)

    def measured(self, now_ns: int) -> np.ndarray | None:
        """Current joint positions [S] in robot units, or None while any is missing or too old."""
        with self._lock:
            return None if self.samples.problem(now_ns, self.max_age_ns) else self.samples.positions.copy()

    def problem(self, now_ns: int, not_before_ns: int = 0) -> str:
        """Why no observation can be taken now; empty if one can."""
        with self._lock:
            return self._problem(now_ns, not_before_ns)

    def source_problem(self, camera: str | None, now_ns: int) -> str:
        """What is wrong with one camera, or with the joints (None); empty if nothing is."""
        with self._lock:
            return self._camera_problem(camera, now_ns) if camera else self.samples.problem(now_ns, self.max_age_ns)

    def take(self, prompt: str, now_ns: int, not_before_ns: int = 0) -> Snapshot | None:
        """Return a snapshot no source of which is older than ``not_before_ns`` or max_age_s; None if there is none
        yet.

        Raises ObservationError for a frame that cannot be decoded; the frame before it then counts again, at its own
        age.
        """
        with self._lock:
            if self._problem(now_ns, not_before_ns):
                return None
            frames = {camera: stream.latest for camera, stream in self.streams.items()}
            measured, stamp_ns = self.samples.positions.copy(), int(self.samples.stamps_ns.min())
            cleared = self._cleared
        images = {camera: self._picture(self.streams[camera], frame, cleared) for camera, frame in frames.items()}
        with np.errstate(over='ignore'):  # a position that float32 cannot hold is refused by the policy, by name
            state = self.joints.to_policy(measured).astype(np.float32)
        return Snapshot(Observation(images, state, prompt, stamp_ns / 1e9), stamp_ns, measured)

    def ages_s(self, camera: str | None, now_ns: int) -> tuple[float, float]:
        """Seconds since the stamp and since the arrival of a camera's frame, or of the oldest joint (None); infinite
        before the first."""
        with self._lock:
            if camera is None and not self.samples.missing:
                stamp_ns, arrival_ns = int(self.samples.stamps_ns.min()), int(self.samples.arrivals_ns.min())
            elif camera is not None and self.streams[camera].latest is not None:
                stamp_ns, arrival_ns = self.streams[camera].latest.stamp_ns, self.streams[camera].latest.arrival_ns
            else:
                return INFINITY, INFINITY
        return (now_ns - stamp_ns) / 1e9, (now_ns - arrival_ns) / 1e9

    def skew_s(self) -> float:
        """Seconds between the oldest and the newest source (the joints count by their oldest); infinite before all have
        come."""
        with self._lock:
            stamps = self._stamps_ns().values()
            return INFINITY if len(stamps) <= len(self.streams) else (max(stamps) - min(stamps)) / 1e9

    def _picture(self, stream: CameraStream, sample: Sample, cleared: int) -> np.ndarray:
        with self._lock:
            if stream.good is sample:
                return stream.picture  # unpacked before, when another camera's frame was broken
        try:
            picture = decode_image(sample.message, stream.topic, self._other_encodings)
        except ObservationError:
            with self._lock:
                stream.drop(sample)
            raise
        with self._lock:
            if cleared == self._cleared:  # else it is of the episode before
                stream.good, stream.picture = sample, picture
        return picture

    def _stamps_ns(self) -> dict[str, int]:
        """Stamp of each source that has come; '' is the oldest joint."""
        stamps = {name: stream.latest.stamp_ns for name, stream in self.streams.items() if stream.latest is not None}
        return stamps if self.samples.missing else {**stamps, '': int(self.samples.stamps_ns.min())}

    def _camera_problem(self, camera: str, now_ns: int) -> str:
        stream = self.streams[camera]
        if stream.latest is None:
            return f'no image yet for camera {camera} on {stream.topic}'
        problem = age_problem(stream.latest.stamp_ns, stream.latest.arrival_ns, now_ns, self.max_age_ns)
        return f'camera {camera} on {stream.topic} {problem}' if problem else ''

    def _problem(self, now_ns: int, not_before_ns: int) -> str:
        for camera in self.streams:
            problem = self._camera_problem(camera, now_ns)
            if problem:
                return problem
        problem = self.samples.problem(now_ns, self.max_age_ns)
        if problem:
            return problem
        stamps = self._stamps_ns()
        oldest, newest = min(stamps, key=stamps.get), max(stamps, key=stamps.get)
        apart_ns = stamps[newest] - stamps[oldest]
        if stamps[oldest] < not_before_ns:
            return f'{self._called(oldest)} has not been seen since the end of the last chunk'
        if self.max_skew_ns and apart_ns > self.max_skew_ns:
            return (f'{self._called(oldest)} is {apart_ns / 1e9:.3f} s behind {self._called(newest)}, max_skew_s is '
                    f'{self.max_skew_ns / 1e9:.3f}')
        return ''

    def _called(self, source: str) -> str:
        if source:
            return f'camera {source} on {self.streams[source].topic}'
        return f'joint {self.joints.names[int(self.samples.stamps_ns.argmin())]} on {self.samples.topic}'
