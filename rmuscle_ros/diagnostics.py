# SPDX-License-Identifier: Apache-2.0
"""/diagnostics: is every input fresh, does the policy keep up, which path serves it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from builtin_interfaces.msg import Time
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue

from rmuscle_core.sensing.observe import ObservationBuffer
from rmuscle_ros.publish import ChunkPublisher
from rmuscle_ros.topics import Topics

OK, WARN, ERROR, STALE = DiagnosticStatus.OK, DiagnosticStatus.WARN, DiagnosticStatus.ERROR, DiagnosticStatus.STALE


def entry(name: str, level: bytes, message: str, values: Mapping[str, Any], hardware: str) -> DiagnosticStatus:
    """One line of the array; floats are written with three decimals."""
    pairs = [KeyValue(key=k, value=f'{v:.3f}' if isinstance(v, float) else str(v)) for k, v in values.items()]
    return DiagnosticStatus(level=level, name=f'rmuscle: {name}', message=message, hardware_id=hardware, values=pairs)


class InputDiagnostics:
    """Entries for the cameras and the joint states."""

    def __init__(self, buffer: ObservationBuffer, hardware: str, topics: Topics):
        self._buffer, self._hardware, self._topics = buffer, hardware, topics
        self._counted = {camera: (0, time.monotonic()) for camera in buffer.streams}

    def entries(self, now_ns: int, expected_hz: float) -> list[DiagnosticStatus]:
        """One entry per camera and one for the joints."""
        max_age_s = self._buffer.max_age_ns / 1e9
        found = [self._camera(camera, now_ns, max_age_s, expected_hz) for camera in self._buffer.streams]
        age_s = self._buffer.age_s(None, now_ns)
        level, message = self._freshness('joint_states', age_s, max_age_s)
        values = {'age_s': age_s, 'bad_messages': self._buffer.samples.messages_bad}
        return [*found, entry('joint states', level, message, values, self._hardware)]

    def _camera(self, camera: str, now_ns: int, max_age_s: float, expected_hz: float) -> DiagnosticStatus:
        stream, now = self._buffer.streams[camera], time.monotonic()
        before, since = self._counted[camera]
        self._counted[camera] = (stream.frames, now)
        rate_hz = (stream.frames - before) / max(now - since, 1e-3)
        age_s = self._buffer.age_s(camera, now_ns)
        level, message = self._freshness(stream.topic, age_s, max_age_s)
        if level == OK and rate_hz < 0.8 * expected_hz:
            level, message = WARN, (f'{rate_hz:.1f} Hz, expected {expected_hz:.1f}; large images need '
                                    'config/fastdds_shm.xml in the camera driver, or compressed transport')
        sample = stream.latest
        encoding = getattr(sample.message, 'encoding', getattr(sample.message, 'format', '')) if sample else ''
        values = {'topic': stream.topic, 'age_s': age_s, 'rate_hz': rate_hz, 'encoding': encoding,
                  'frames': stream.frames, 'frames_bad': stream.frames_bad}
        return entry(f'camera {camera}', level, message, values, self._hardware)

    def _freshness(self, topic: str, age_s: float, max_age_s: float) -> tuple[bytes, str]:
        if topic in self._topics.incompatible:
            return ERROR, self._topics.incompatible[topic]
        if math.isinf(age_s):
            return STALE, f'nothing received on {topic}'
        if not -max_age_s <= age_s <= max_age_s:
            return ERROR, f'{topic} is {age_s:.2f} s old, max_age_s is {max_age_s:.2f}'
        return OK, 'fresh'


def policy_entry(state: str, waiting_for: str, stalled_s: float, output: ChunkPublisher, counts: Mapping[str, int],
                 last_error: str, hardware: str) -> DiagnosticStatus:
    """The policy: what it waits for, how long it takes, what it had to refuse."""
    level, message = OK, state
    if output.refused['expired']:
        level, message = WARN, 'chunks arrive after their last step; use a faster profile'
    if waiting_for:
        level, message = WARN, f'{state}, waiting: {waiting_for}'
    if last_error:
        level, message = ERROR, last_error
    if stalled_s:
        level, message = ERROR, f'stalled: a policy call has been running for {stalled_s:.1f} s'
    refused = {f'chunks_{kind}': output.refused[kind] for kind in ('nonfinite', 'expired', 'malformed')}
    values = {'state': state, 'call_ms': output.total_ms, 'policy_latency_s': output.latency_s,
              'chunks_published': output.published, **refused,
              'boundary_rejected': output.refused['boundary'], 'steps_trimmed': output.trimmed,
              'values_clamped': output.clamped, 'values_capped': output.capped, **counts, 'last_error': last_error}
    return entry('policy', level, message, values, hardware)


def cache_entry(status: Mapping[str, int], problems: list[str], hardware: str) -> DiagnosticStatus:
    """The muscle memory: share of calls served by a reference, entries, slots; what is wrong with the library."""
    served = {path: status[f'served_{path}'] for path in ('library', 'previous_call', 'dense')}
    total = sum(served.values())
    hits = total - served['dense']
    message = f'{hits} of {total} calls reused a reference' if total else 'no calls yet'
    values = {**status, 'hit_ratio': hits / total if total else 0.0, 'problems': len(problems)}
    return entry('cache', WARN if problems else OK, problems[-1] if problems else message, values, hardware)


def diagnostic_array(stamp: Time, entries: list[DiagnosticStatus]) -> DiagnosticArray:
    message = DiagnosticArray(status=entries)
    message.header.stamp = stamp
    return message
