# SPDX-License-Identifier: Apache-2.0
"""Every call of a recorded episode, dense and cached on the same observation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from rmuscle_core.library.recording import RecordedEpisode
from rmuscle_core.observation import CallReport
from rmuscle_core.policy import MusclePolicy

PATIENCE_S = 600.0  # for expansions, which the budget bounds


@dataclass(frozen=True)
class ReplayedCall:
    """One observation, answered twice.

    dense, cached: actions float32 [H, A], the checkpoint's units. images: what the cameras saw, dropped for calls that
    the report does not show. recomputed: camera -> share of the prefix layers that recomputed each patch, float
    [side, side]; empty where the engine does not tell.
    """

    episode: str
    number: int
    stamp_s: float
    images: Mapping[str, np.ndarray]
    dense: np.ndarray
    cached: np.ndarray
    dense_ms: float
    report: CallReport
    recomputed: dict[str, np.ndarray]


def replay(episode: RecordedEpisode, dense: MusclePolicy, cached: MusclePolicy) -> Iterator[ReplayedCall]:
    """Replay one episode. Between calls the cached policy expands what its budget allows, so that the result does not
    depend on how fast this machine is."""
    prompt = episode.observations[0].prompt
    for policy in (dense, cached):
        policy.reset_episode(prompt)
        policy.wait_ready(PATIENCE_S)
    for number, observation in enumerate(episode.observations):
        # By turns first, so that neither always finds the processor's caches warm.
        order = (dense, cached) if number % 2 == 0 else (cached, dense)
        chunks = {id(policy): policy.infer(observation) for policy in order}
        recomputed = recomputed_shares(cached)
        cached.chunk_published(math.inf)
        cached.wait_ready(PATIENCE_S)
        plain, reused = chunks[id(dense)], chunks[id(cached)]
        yield ReplayedCall(episode.name, number, observation.stamp_s, observation.images, plain.actions,
                           reused.actions, plain.report.milliseconds['total'], reused.report, recomputed)


def recomputed_shares(policy: MusclePolicy) -> dict[str, np.ndarray]:
    """Of the policy's last call: camera -> share of layers that recomputed each patch, [side, side]."""
    layers = getattr(policy.engine, 'recomputed', [])
    if not layers:
        return {}
    config = policy.config
    tokens, side = config.vision.tokens, config.vision.image_size // config.vision.patch
    counts = np.zeros(len(policy.cameras) * tokens)
    for rows in layers:
        visual = rows.cpu().numpy()
        counts[visual[visual < len(counts)]] += 1
    shares = (counts / len(layers)).reshape(len(policy.cameras), side, side)
    return dict(zip(policy.cameras, shares))
