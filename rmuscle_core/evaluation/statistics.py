# SPDX-License-Identifier: Apache-2.0
"""Success rates with their uncertainty, alone and paired."""

from __future__ import annotations

import math
from collections.abc import Sequence


def wilson_interval(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Score interval of a success rate (Wilson 1927); z = 1.96 gives 95 %. Sound for small samples and rates near 1."""
    rate, spread = successes / trials, z * z / trials
    centre = (rate + spread / 2) / (1 + spread)
    half = z * math.sqrt(rate * (1 - rate) / trials + spread / (4 * trials)) / (1 + spread)
    return max(0.0, centre - half), min(1.0, centre + half)


def mcnemar(first: Sequence[bool], second: Sequence[bool]) -> tuple[int, int, float]:
    """Exact two-sided test of two policies on equal seeds (McNemar 1947): (only first, only second, p).

    Only pairs that differ say something; under equal success they fall to either side like a coin.
    """
    if len(first) != len(second):
        raise ValueError(f'pairs need equal lengths, not {len(first)} and {len(second)}')
    only_first = sum(a and not b for a, b in zip(first, second))
    only_second = sum(b and not a for a, b in zip(first, second))
    differing = only_first + only_second
    tail = sum(math.comb(differing, k) for k in range(min(only_first, only_second) + 1)) / 2**differing
    return only_first, only_second, min(1.0, 2 * tail)


def paired_difference(first: Sequence[bool], second: Sequence[bool], z: float = 1.96) -> tuple[float, float, float]:
    """Success of ``second`` minus ``first`` on equal seeds, and its interval (Agresti and Min 2005: half a pair added
    to each of the four cells, so that few or no differing pairs still give an interval)."""
    only_first, only_second, _ = mcnemar(first, second)
    trials, b, c = len(first) + 2, only_second + 0.5, only_first + 0.5
    shift = (b - c) / trials
    half = z * math.sqrt(max(b + c - (b - c) ** 2 / trials, 0.0)) / trials
    return (only_second - only_first) / len(first), shift - half, shift + half
