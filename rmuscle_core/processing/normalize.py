# SPDX-License-Identifier: Apache-2.0
"""Normalisation of state and actions by the statistics a checkpoint was trained with, and its inverse."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rmuscle_core.errors import CheckpointError

# mode -> the two statistics that are mapped to -1 and +1
RANGES = {'QUANTILES': ('q01', 'q99'), 'QUANTILE10': ('q10', 'q90'), 'MIN_MAX': ('min', 'max')}


@dataclass(frozen=True)
class Normalizer:
    """Affine map of a feature [..., dims] float32, one pair of statistics per dimension. Nothing is clipped.

    Ranges: 2 (x - low) / (high - low) - 1. MEAN_STD: (x - mean) / std. IDENTITY: unchanged. Where eps goes is the
    origin's: LeRobot puts it in place of a range of exactly 0, and adds it to std in this direction only; openpi adds
    it to every range and std in both directions.
    """

    mode: str
    first: np.ndarray  # low or mean
    second: np.ndarray  # high or std
    eps: float = 1e-8
    origin: str = 'lerobot'  # or 'openpi'

    @classmethod
    def from_statistics(cls, mode: str, statistics: Mapping[str, np.ndarray], key: str, dims: int, eps: float = 1e-8,
                        source: str = 'the statistics file', origin: str = 'lerobot') -> Normalizer:
        """Pick the mode's two statistics of feature ``key``; absent, misshapen or impossible ones are refused."""
        if mode == 'IDENTITY':
            return cls(mode, np.zeros(dims, np.float32), np.ones(dims, np.float32), eps, origin)
        if mode not in RANGES and mode != 'MEAN_STD':
            raise CheckpointError(f'{source}: normalisation of {key} must be IDENTITY, MEAN_STD or one of '
                                  f'{", ".join(RANGES)}, not {mode!r}; re-export the checkpoint')
        pair = []
        for name in RANGES.get(mode, ('mean', 'std')):
            found = statistics.get(f'{key}.{name}')
            if found is None or np.shape(found) != (dims,) or not np.isfinite(found).all():
                what = 'nothing' if found is None else f'shape {list(np.shape(found))} or non-finite values'
                raise CheckpointError(f'{source}: {mode} needs {dims} finite numbers in {key}.{name}, found {what}; '
                                      're-export the checkpoint with its training statistics')
            pair.append(np.asarray(found, np.float32))
        wrong = np.flatnonzero(pair[1] < (0 if mode == 'MEAN_STD' else pair[0]))
        if wrong.size:
            low, high = (values[wrong[0]] for values in pair)
            names = ' and '.join(RANGES.get(mode, ('mean', 'std')))
            raise CheckpointError(f'{source}: {key} dimension {wrong[0]} has {low:g} and {high:g} as {names}, which no '
                                  'data can have; re-export the checkpoint with its training statistics')
        return cls(mode, *pair, eps=eps, origin=origin)

    def normalize(self, values: np.ndarray) -> np.ndarray:
        """Raw units to the policy's scale."""
        values = np.asarray(values, np.float32)
        if self.mode == 'IDENTITY':
            return values
        if self.mode == 'MEAN_STD':
            return (values - self.first) / self._deviation(forward=True)
        return np.float32(2) * (values - self.first) / self._span() - np.float32(1)

    def unnormalize(self, values: np.ndarray) -> np.ndarray:
        """The policy's scale to raw units."""
        values = np.asarray(values, np.float32)
        if self.mode == 'IDENTITY':
            return values
        if self.mode == 'MEAN_STD':
            return values * self._deviation(forward=False) + self.first
        return (values + np.float32(1)) * self._span() / np.float32(2) + self.first

    def limits(self) -> tuple[np.ndarray, np.ndarray]:
        """Lowest and highest training values [dims], without outliers: of MEAN_STD those within three deviations."""
        if self.mode == 'MEAN_STD':
            return self.first - 3 * self.second, self.first + 3 * self.second
        return self.first, self.second

    def narrow(self) -> list[int]:
        """Dimensions that hardly moved in training: a small offset there becomes a huge normalised value."""
        if self.mode == 'IDENTITY':
            return []
        span = self.second if self.mode == 'MEAN_STD' else self.second - self.first
        return [int(i) for i in np.flatnonzero(np.abs(span) < 1e-4 * max(1e-12, np.abs(span).max(initial=0)))]

    def digest(self) -> str:
        """Short hash of mode and statistics; equal digests normalise equally."""
        rule = '' if self.origin == 'lerobot' else f' {self.origin}'
        hashed = hashlib.blake2b(f'{self.mode} {self.eps}{rule}'.encode(), digest_size=8)
        hashed.update(self.first.astype('<f4').tobytes() + self.second.astype('<f4').tobytes())
        return hashed.hexdigest()

    def _span(self) -> np.ndarray:
        span = self.second - self.first
        if self.origin == 'openpi':
            return span + np.float32(self.eps)
        return np.where(span == 0, np.float32(self.eps), span)

    def _deviation(self, forward: bool) -> np.ndarray:
        return self.second + np.float32(self.eps) if forward or self.origin == 'openpi' else self.second


def feature_statistics(values: np.ndarray) -> dict[str, np.ndarray]:
    """Statistics of training data [N, dims] under the names LeRobot stores: mean, std, min, max, q01 .. q99, count."""
    values = np.asarray(values, np.float64)
    quantiles = {f'q{q:02d}': np.quantile(values, q / 100, axis=0) for q in (1, 10, 50, 90, 99)}
    moments = {'mean': values.mean(0), 'std': values.std(0), 'min': values.min(0), 'max': values.max(0)}
    named = {**moments, **quantiles, 'count': np.array([len(values)])}
    return {name: np.asarray(value, np.float32) for name, value in named.items()}
