# SPDX-License-Identifier: Apache-2.0
"""What replayed calls say: how far actions move, how chunks join, what a call costs, which path served it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from rmuscle_core.errors import EpisodeError
from rmuscle_core.observation import Observation
from rmuscle_core.policy import MusclePolicy
from rmuscle_core.replay.calls import ReplayedCall

WORST = 5


@dataclass(frozen=True)
class Limits:
    """Exit code 1 beyond these; None asks nothing.

    action_difference: mean over a call's executed steps and joints, in half ranges of the actions seen in training, for
    the worst call in twenty. boundary_ratio: 95th percentile of the jump between chunks, cached over dense. hit_ratio:
    calls served by a reference. speedup: median.
    """

    action_difference: float | None = None
    boundary_ratio: float | None = None
    hit_ratio: float | None = None
    speedup: float | None = None


def half_ranges(policy: MusclePolicy, observation: Observation) -> np.ndarray:
    """What one unit of the model's normalised action is worth, per joint: float32 [A], the checkpoint's units; 1 for a
    joint that stood still in training, whose actions cannot differ."""
    ones = np.ones((policy.config.chunk_size, policy.config.padded_dim), np.float32)
    decode = policy.processor.decode
    worth = np.abs(decode(ones, observation) - decode(-ones, observation))[0] / 2
    return np.where(worth > 0, worth, np.float32(1))


def differences(calls: Sequence[ReplayedCall], executed: int) -> np.ndarray:
    """|cached - dense| of the executed steps: [calls, executed, A]."""
    return np.abs(np.stack([call.cached[:executed] - call.dense[:executed] for call in calls]))


def per_call_difference(calls: Sequence[ReplayedCall], executed: int, scale: np.ndarray) -> np.ndarray:
    """Mean over executed steps and joints, in half ranges: [calls]."""
    return (differences(calls, executed) / scale).mean((1, 2))


def boundary_jumps(calls: Sequence[ReplayedCall], executed: int, scale: np.ndarray) -> dict[str, np.ndarray]:
    """For every call that follows another: the largest joint's step from where the former chunk would have gone on to
    where the new one begins, in half ranges."""
    jumps: dict[str, list[float]] = {'dense': [], 'cached': []}
    for before, after in pairwise(calls):
        if before.episode != after.episode:
            continue
        for kind, found in jumps.items():
            chunk, following = getattr(before, kind), getattr(after, kind)
            planned = chunk[min(executed, len(chunk) - 1)]
            found.append(float((np.abs(following[0] - planned) / scale).max()))
    return {kind: np.array(found) for kind, found in jumps.items()}


def summarise(calls: Sequence[ReplayedCall], joints: Sequence[str], executed: int, scale: np.ndarray,
              limits: Limits) -> dict:
    """Plain numbers, fit for JSON. Raises EpisodeError when there is no call."""
    if not calls:
        raise EpisodeError('there is no call to report: no episode is left beside the references')
    moved, per_call = differences(calls, executed), per_call_difference(calls, executed, scale)
    jumps = boundary_jumps(calls, executed, scale)
    milliseconds = {'dense': [c.dense_ms for c in calls], 'cached': [c.report.milliseconds['total'] for c in calls]}
    paths = Counter(call.report.path for call in calls)
    similarities = [c.report.similarity for c in calls if np.isfinite(c.report.similarity)]
    accounts = [_account(call, difference) for call, difference in zip(calls, per_call)]
    found = {
        'calls': len(calls), 'episodes': len({call.episode for call in calls}), 'executed_steps': executed,
        'action_difference': {'mean': float(per_call.mean()), 'p95': _p95(per_call), 'max': float(per_call.max())},
        'joints': {name: {'mean': float(moved[..., j].mean()), 'p95': _p95(moved[..., j]),
                          'max': float(moved[..., j].max()), 'half_range': float(scale[j])}
                   for j, name in enumerate(joints)},
        'boundary_jump': {kind: {'median': _median(found), 'p95': _p95(found)} for kind, found in jumps.items()},
        'milliseconds': {kind: {'p50': _median(ms), 'p95': _p95(ms)} for kind, ms in milliseconds.items()},
        'speedup': _median([d / c for d, c in zip(*milliseconds.values())]),
        'paths': dict(paths), 'hit_ratio': 1 - paths['dense'] / len(calls),
        'similarity': float(np.mean(similarities)) if similarities else None,
        'by_episode': by_episode(accounts), 'by_call': accounts,
        'worst_calls': [accounts[i] for i in worst_of(per_call)]}
    return found | {'limits': check(found, limits)}


def worst_of(per_call: np.ndarray) -> list[int]:
    """Which calls the report shows: those that moved an action most, if any did; per_call [calls]."""
    return [int(i) for i in np.argsort(-per_call)[:WORST] if per_call[i] > 0]


def by_episode(accounts: Sequence[dict]) -> list[dict]:
    """One line per replayed episode, in order."""
    lines = []
    for name in dict.fromkeys(account['episode'] for account in accounts):
        own = [account for account in accounts if account['episode'] == name]
        similarities = [account['similarity'] for account in own if account['similarity'] is not None]
        lines.append({'episode': name, 'calls': len(own), 'paths': dict(Counter(a['path'] for a in own)),
                      'similarity': float(np.mean(similarities)) if similarities else None,
                      'difference': float(np.mean([account['difference'] for account in own])),
                      'worst': max(account['difference'] for account in own)})
    return lines


def check(found: dict, limits: Limits) -> list[dict]:
    """One line per limit that was asked for: name, limit, what was found, whether it holds."""
    jump = found['boundary_jump']
    asked = [('action difference, p95 of calls', limits.action_difference, found['action_difference']['p95'], False),
             ('boundary jump, cached over dense', limits.boundary_ratio,
              jump['cached']['p95'] / max(jump['dense']['p95'], 1e-9), False),
             ('calls served by a reference', limits.hit_ratio, found['hit_ratio'], True),
             ('speedup', limits.speedup, found['speedup'], True)]
    return [{'name': name, 'limit': limit, 'found': value, 'at_least': at_least,
             'holds': bool(value >= limit if at_least else value <= limit)}
            for name, limit, value, at_least in asked if limit is not None]


def _account(call: ReplayedCall, difference: float) -> dict:
    report, reference = call.report, call.report.reference
    if report.path == 'previous_call':  # a running episode has no name yet; this one does
        reference = f'{reference.rpartition("/")[0]}/{call.episode}#{reference.rpartition("#")[2]}'
    return {'episode': call.episode, 'call': call.number, 'difference': float(difference), 'path': report.path,
            'reason': report.reason, 'reference': reference,
            'similarity': float(report.similarity) if np.isfinite(report.similarity) else None,
            'dense_ms': call.dense_ms, 'cached_ms': report.milliseconds['total']}


def _median(values: Sequence[float]) -> float:
    return float(np.median(values)) if len(values) else 0.0


def _p95(values: Sequence[float]) -> float:
    return float(np.percentile(values, 95)) if len(values) else 0.0
