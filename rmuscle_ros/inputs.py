# SPDX-License-Identifier: Apache-2.0
"""What /diagnostics says of each input: is it there, fresh, as frequent as expected, and readable."""

from __future__ import annotations

import math

from diagnostic_msgs.msg import DiagnosticStatus

from rmuscle_core.sensing.observe import ObservationBuffer
from rmuscle_ros.diagnostics import ERROR, OK, STALE, WARN, entry
from rmuscle_ros.topics import Topics

TOO_SLOW = 0.8  # share of the expected rate below which diagnostics warn


class InputDiagnostics:
    """One entry per camera, one for the joints, one for any other topic whose publisher does not fit."""

    def __init__(self, buffer: ObservationBuffer, hardware: str, topics: Topics):
        self._buffer, self._hardware, self._topics = buffer, hardware, topics
        self._counted: dict[str, tuple[int, int, int]] = {}  # camera -> frames, stamp and bad frames at the last entry

    def entries(self, now_ns: int, expected_hz: float) -> list[DiagnosticStatus]:
        """Levels: STALE never came, ERROR unfit for a policy call, WARN fit but not as it should be."""
        found = [self._camera(camera, now_ns, expected_hz) for camera in self._buffer.streams]
        found.append(self._joints(now_ns))
        known = {self._buffer.samples.topic, *(stream.topic for stream in self._buffer.streams.values())}
        return found + [entry(topic, WARN, text, {'topic': topic}, self._hardware)
                        for topic, text in self._topics.misfits().items() if topic not in known]

    def _camera(self, camera: str, now_ns: int, expected_hz: float) -> DiagnosticStatus:
        stream, sample = self._buffer.streams[camera], self._buffer.streams[camera].latest
        level, message = self._level(camera, stream.topic, now_ns)
        rate_hz, broken = self._since_last_entry(camera, now_ns)
        if level == OK and rate_hz < TOO_SLOW * expected_hz:  # not while it is unknown
            level, message = WARN, (f'{rate_hz:.1f} Hz, expected {expected_hz:.1f}; large images need '
                                    'config/fastdds_shm.xml in the camera driver, or compressed transport')
        if level == OK and broken:
            level, message = WARN, f'{broken} frames on {stream.topic} could not be read since the last report'
        encoding = getattr(sample.message, 'encoding', getattr(sample.message, 'format', '')) if sample else ''
        values = {'topic': stream.topic, **self._ages(camera, now_ns), 'rate_hz': rate_hz, 'encoding': encoding,
                  'frames': stream.frames, 'frames_bad': stream.frames_bad,
                  'frames_lost': self._topics.lost[stream.topic]}
        return entry(f'camera {camera}', level, message, values, self._hardware)

    def _joints(self, now_ns: int) -> DiagnosticStatus:
        samples = self._buffer.samples
        level, message = self._level(None, samples.topic, now_ns)
        values = {'topic': samples.topic, **self._ages(None, now_ns), 'skew_s': self._buffer.skew_s(),
                  'bad_messages': samples.messages_bad}
        return entry('joint states', level, message, values, self._hardware)

    def _level(self, camera: str | None, topic: str, now_ns: int) -> tuple[bytes, str]:
        problem = self._buffer.source_problem(camera, now_ns)
        misfit = self._topics.misfits().get(topic)
        if misfit:
            return (ERROR if problem else WARN), misfit  # another publisher may feed the topic all the same
        if math.isinf(self._buffer.ages_s(camera, now_ns)[0]):
            foreign = self._topics.foreign(topic)
            return (ERROR, foreign) if foreign else (STALE, problem)
        return (ERROR, problem) if problem else (OK, 'fresh')

    def _ages(self, camera: str | None, now_ns: int) -> dict[str, float]:
        age_s, arrival_age_s = self._buffer.ages_s(camera, now_ns)
        return {'age_s': age_s, 'arrival_age_s': arrival_age_s}

    def _since_last_entry(self, camera: str, now_ns: int) -> tuple[float, int]:
        """Frame rate and number of broken frames since the last entry; the rate is NaN while it is unknown.

        The rate goes by the frames' own stamps: it is then the same for a bag played at another speed, and however late
        this entry is made. Where no frame came, it is at most the one that a frame now would make it.
        """
        stream = self._buffer.streams[camera]
        frames, broken, stamp_ns = stream.frames, stream.frames_bad, stream.latest.stamp_ns if stream.latest else 0
        before, since_ns, broken_before = self._counted.get(camera, (frames, stamp_ns, broken))
        new = frames > before
        until_ns = stamp_ns if new else now_ns
        rate_hz = max(1, frames - before) * 1e9 / (until_ns - since_ns) if until_ns > since_ns > 0 else math.nan
        self._counted[camera] = frames, stamp_ns if new or not stamp_ns else since_ns, broken
        return rate_hz, broken - broken_before
