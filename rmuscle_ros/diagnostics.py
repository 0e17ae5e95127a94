# SPDX-License-Identifier: Apache-2.0
"""/diagnostics: is every input fresh, does the policy keep up, which path serves it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from builtin_interfaces.msg import Time
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue

from rmuscle_ros.health import Health
from rmuscle_ros.publish import ChunkPublisher
from rmuscle_ros.worker import InferenceWorker

OK, WARN, ERROR, STALE = DiagnosticStatus.OK, DiagnosticStatus.WARN, DiagnosticStatus.ERROR, DiagnosticStatus.STALE


def entry(name: str, level: bytes, message: str, values: Mapping[str, Any], hardware: str) -> DiagnosticStatus:
    """One line of the array; floats are written with three decimals."""
    pairs = [KeyValue(key=k, value=f'{v:.3f}' if isinstance(v, float) else str(v)) for k, v in values.items()]
    return DiagnosticStatus(level=level, name=f'rmuscle: {name}', message=message, hardware_id=hardware, values=pairs)


def policy_entry(state: str, health: Health, worker: InferenceWorker, output: ChunkPublisher, last_error: str,
                 hardware: str) -> DiagnosticStatus:
    """The policy: what it waits for, how long it takes, what it had to refuse. ERROR: it does not do its work."""
    level, message, age_s = OK, 'running' if worker.running else state, worker.call_age_s()
    if health.late:
        level, message = WARN, (f'the last call took {health.call_ms / 1e3:.2f} s, the executed steps of a chunk last '
                                f'{health.deadline_s:.2f} s; use a faster profile or more execute_steps')
    if health.waiting_for and worker.running:
        level, message = WARN, f'{message}, waiting: {health.waiting_for}'
    if last_error:
        level, message = WARN if health.refusal == 'expired' else ERROR, last_error
    if health.stalled:
        level, message = ERROR, f'stalled: a policy call has been running for {age_s:.1f} s'
    refused = {f'chunks_{kind}': output.refused[kind] for kind in ('nonfinite', 'expired', 'malformed')}
    values = {'state': state, 'episode': health.episode, 'calls': worker.calls, 'calls_dropped': worker.discarded,
              'call_ms': health.call_ms, **health.timing(), 'policy_latency_s': output.latency_s,
              'chunks_published': output.published, **refused, 'boundary_rejected': output.refused['boundary'],
              'steps_trimmed': output.trimmed, 'values_clamped': output.clamped, 'values_capped': output.capped,
              'last_error': last_error}
    return entry('policy', level, message, values, hardware)


def command_entry(topic: str, publishers: int, subscribers: int, hardware: str) -> DiagnosticStatus:
    """Who is at the two ends of the trajectories' topic; nothing else tells that a remapping was forgotten."""
    level, message = OK, 'executed by a controller'
    if not subscribers:
        level, message = WARN, f'nobody subscribes to {topic}; remap joint_trajectory to /<controller>/joint_trajectory'
    if publishers > 1:
        level, message = WARN, f'{publishers} nodes publish on {topic}, and the robot follows the last; stop the others'
    values = {'topic': topic, 'publishers': publishers, 'subscribers': subscribers}
    return entry('joint trajectory', level, message, values, hardware)


def cache_entry(status: Mapping[str, int], problems: list[str], health: Health, hardware: str) -> DiagnosticStatus:
    """The muscle memory: share of calls served by a reference, entries, slots; what is wrong with the library."""
    served = {path: status[f'served_{path}'] for path in ('library', 'previous_call', 'dense')}
    total = sum(served.values())
    hits = total - served['dense']
    message = f'{hits} of {total} calls reused a reference' if total else 'no calls yet'
    values = {**status, 'hit_ratio': hits / total if total else 0.0, **health.reuse(), 'problems': len(problems)}
    return entry('cache', WARN if problems else OK, problems[-1] if problems else message, values, hardware)


def diagnostic_array(stamp: Time, entries: list[DiagnosticStatus], namespace: str) -> DiagnosticArray:
    """All cells of a site publish on one topic, so an entry's name begins with the namespace where there is one."""
    for status in entries:
        status.name = f'{namespace.strip("/")}/{status.name}'.lstrip('/')
    message = DiagnosticArray(status=entries)
    message.header.stamp = stamp
    return message
