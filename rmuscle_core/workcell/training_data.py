# SPDX-License-Identifier: Apache-2.0
"""Demonstrations as tensors on the training device, in the form the model meets them in a policy call."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rmuscle_core.processing import ByteTokenizer, Normalizer, feature_statistics, prompt_ids, state_bins
from rmuscle_core.workcell.dataset import Demonstrations

# A joint that hardly moved would be scaled up to noise: no range is taken as narrower than this (radians, or share of
# the gripper's travel).
NARROWEST_RANGE = 0.1
_HELD_OUT = 15  # one episode, and one still frame, in so many is kept for validation


@dataclass(frozen=True)
class Frames:
    """Training pairs on the device; N frames, V views, A joints, D landmark coordinates."""

    images: torch.Tensor  # uint8 [N,V,S,S,3]
    states: torch.Tensor  # float32 [N,A], normalised
    landmarks: torch.Tensor  # float32 [N,D], standardised
    chunks: torch.Tensor | None = None  # float32 [N,H,A], normalised

    def __len__(self) -> int:
        return len(self.images)

    def take(self, index: torch.Tensor) -> Frames:
        """Return the frames at ``index`` [n] int64 on the device."""
        chunks = None if self.chunks is None else self.chunks[index]
        return Frames(self.images[index], self.states[index], self.landmarks[index], chunks)


class TrainingData:
    """Demonstrations normalised by their own quantiles, split into training and held-out episodes.

    demonstrated, located: Frames to train on; held_demonstrated, held_located: the same for validation.
    statistics: feature -> statistics, as the checkpoint stores them. landmark_scale: metres per standard unit [D].
    """

    def __init__(self, demonstrations: Demonstrations, chunk_size: int, device: str):
        chunks = demonstrations.chunks(chunk_size)
        held = demonstrations.episodes % _HELD_OUT == _HELD_OUT - 1
        self.statistics = {'observation.state': widened(feature_statistics(demonstrations.states[~held])),
                           'action': widened(feature_statistics(chunks[~held].reshape(-1, chunks.shape[-1])))}
        state, action = (_normalizer(self.statistics, key) for key in self.statistics)
        located = demonstrations.located_landmarks
        centre, self.landmark_scale = located.mean(0), located.std(0) + 1e-3

        def frames(images: np.ndarray, states: np.ndarray, landmarks: np.ndarray,
                   actions: np.ndarray | None = None) -> Frames:
            on_device = [None if x is None else torch.from_numpy(np.ascontiguousarray(x)).to(device) for x in (
                images, state.normalize(states), (landmarks - centre) / self.landmark_scale,
                None if actions is None else action.normalize(actions))]
            return Frames(*on_device)

        self.demonstrated, self.held_demonstrated = (
            frames(demonstrations.images[part], demonstrations.states[part], demonstrations.landmarks[part],
                   chunks[part])
            for part in (~held, held))
        held = np.arange(len(demonstrations.located_images)) % _HELD_OUT == _HELD_OUT - 1
        self.located, self.held_located = (
            frames(demonstrations.located_images[part], demonstrations.located_states[part],
                   demonstrations.located_landmarks[part]) for part in (~held, held))


def widened(statistics: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the statistics with q01 and q99 at least NARROWEST_RANGE apart."""
    low, high = statistics['q01'], statistics['q99']
    centre, half = (high + low) / 2, np.maximum((high - low) / 2, NARROWEST_RANGE / 2)
    return {**statistics, 'q01': centre - half, 'q99': centre + half}


def _normalizer(statistics: dict[str, dict[str, np.ndarray]], key: str) -> Normalizer:
    flat = {f'{key}.{name}': value for name, value in statistics[key].items()}
    return Normalizer.from_statistics('QUANTILES', flat, key, len(flat[f'{key}.q01']))


class PromptWriter:
    """pi0.5 prompts of one task for whole batches: the state's bins are written into a fixed row of token ids.

    Every bin is one token of the byte tokenizer, so all prompts have one length and nothing is padded.
    """

    def __init__(self, task: str, joints: int, device: str):
        state = np.zeros(joints, np.float32)
        ids = np.array(prompt_ids('pi05', task, state, ByteTokenizer(), limit=10_000)[0])
        other = np.array(prompt_ids('pi05', task, state + 0.5, ByteTokenizer(), limit=10_000)[0])
        slots = np.flatnonzero(ids != other)
        self._ids = torch.from_numpy(ids).to(device)
        self._slots = slice(int(slots[0]), int(slots[-1]) + 1)
        self._first = int(ids[slots[0]] - state_bins(state)[0])
        self._edges = torch.linspace(-1, 1, 257, device=device)[:-1].contiguous()

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Normalised states [B,A] to token ids [B,P] int64."""
        ids = self._ids.repeat(len(states), 1)
        ids[:, self._slots] = torch.bucketize(states, self._edges, right=True) - 1 + self._first
        return ids
