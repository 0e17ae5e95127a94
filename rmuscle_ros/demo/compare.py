# SPDX-License-Identifier: Apache-2.0
"""What the caches changed: every cached call of the demo once more, dense, on the very observation it had."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from rmuscle_core.policy import MusclePolicy
from rmuscle_core.settings import Settings
from rmuscle_ros.demo.session import Call, Run

WARM_CALLS = 2  # of an episode; the share served by the library is also counted without them


@dataclass(frozen=True)
class Illustration:
    """One cached call to look at: per view uint8 [h, w, 3] and how many layers recomputed each patch [side, side]."""

    views: dict[str, np.ndarray]
    layers_recomputed: dict[str, np.ndarray]
    layers: int
    cached: np.ndarray  # float32 [H, A]
    dense: np.ndarray


def compare(checkpoint: Path, library: Path, prompt: str, cached: list[Run],
            settings: Settings) -> tuple[np.ndarray, Illustration]:
    """Return |cached - dense| per cached call, float32 [calls, H, A], and a call of the first episode to show."""
    dense = MusclePolicy.load(checkpoint, settings.with_values(mode='dense'))
    try:
        reruns = [[dense.infer(call.observation).actions for call in run.calls] for run in cached]
    finally:
        dense.close()
    served = [(call.actions, other) for run, again in zip(cached, reruns, strict=True)
              for call, other in zip(run.calls, again, strict=True) if call.status.path != 'dense']
    if not served:
        raise RuntimeError('no call of the cached episodes used a reference; see out/demo/policy_node.log')
    shown = len(cached[0].calls) // 2
    picture = _illustrate(checkpoint, library, prompt, cached[0].calls[:shown + 1], reruns[0][shown], settings)
    return np.abs(np.stack([a - b for a, b in served])), picture


def _illustrate(checkpoint: Path, library: Path, prompt: str, calls: list[Call], dense: np.ndarray,
                settings: Settings) -> Illustration:
    """Replay an episode up to its last call given, to see which patches that call recomputes."""
    policy = MusclePolicy.load(checkpoint, settings, library=library, need_library=True)
    try:
        policy.reset_episode(prompt)
        for call in calls:
            policy.wait_ready(60.0)
            chunk = policy.infer(call.observation)
            policy.chunk_published(float('inf'))
        config = policy.config
        tokens, side = config.vision.tokens, config.vision.image_size // config.vision.patch
        counts = np.zeros(len(config.cameras) * tokens, np.int64)
        for rows in policy.engine.recomputed:
            visual = rows.numpy()
            counts[visual[visual < len(counts)]] += 1
        maps = {camera: counts[i * tokens:(i + 1) * tokens].reshape(side, side)
                for i, camera in enumerate(config.cameras)}
        return Illustration(dict(calls[-1].observation.images), maps, max(len(policy.engine.recomputed), 1),
                            chunk.actions, dense)
    finally:
        policy.close()


def summarise(dense: list[Run], cached: list[Run], difference: np.ndarray) -> dict:
    """Every number of the demo, fit for JSON."""
    last = cached[-1].calls[-1].status
    later = [call for run in cached for call in run.calls[WARM_CALLS:]]
    dense_ms, cached_ms = (median(c.status.total_ms for r in runs for c in r.calls) for runs in (dense, cached))
    return {
        'dense': _account(dense), 'cached': _account(cached),
        'dense_ms_per_call': round(dense_ms, 2), 'cached_ms_per_call': round(cached_ms, 2),
        'ratio_dense_to_cached': round(dense_ms / cached_ms, 3),
        'library_share_after_first_two': round(sum(c.status.path == 'library' for c in later) / max(len(later), 1), 3),
        'mean_action_difference': float(difference.mean()), 'max_action_difference': float(difference.max()),
        'library_megabytes': round(last.library_bytes / 1e6, 2), 'library_entries': last.library_entries,
        'working_set_megabytes': round(last.working_set_bytes / 1e6, 2),
        'token_ratio': round(last.token_ratio, 4), 'neuron_ratio': round(last.neuron_ratio, 4),
    }


def _account(runs: list[Run]) -> dict:
    calls = [call for run in runs for call in run.calls]
    gaps = [gap for run in runs for gap in run.result['gaps_ms']]
    paths = [call.status.path for call in calls]
    return {'episodes': len(runs), 'successes': sum(run.success for run in runs),
            'seeds': [run.result['seed'] for run in runs], 'calls': len(calls),
            'served': {path: paths.count(path) for path in ('library', 'previous_call', 'dense')},
            'policy_latency_ms': round(median(gaps), 2) if gaps else None}
