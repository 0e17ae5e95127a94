# SPDX-License-Identifier: Apache-2.0
"""/diagnostics: is every input fresh, does the policy keep up, which path serves it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from builtin_interfaces.msg import Time
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue

from rmuscle_ros.publish import ChunkPublisher

OK, WARN, ERROR, STALE = DiagnosticStatus.OK, DiagnosticStatus.WARN, DiagnosticStatus.ERROR, DiagnosticStatus.STALE


def entry(name: str, level: bytes, message: str, values: Mapping[str, Any], hardware: str) -> DiagnosticStatus:
    """One line of the array; floats are written with three decimals."""
    pairs = [KeyValue(key=k, value=f'{v:.3f}' if isinstance(v, float) else str(v)) for k, v in values.items()]
    return DiagnosticStatus(level=level, name=f'rmuscle: {name}', message=message, hardware_id=hardware, values=pairs)


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
