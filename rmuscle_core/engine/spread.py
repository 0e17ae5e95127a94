# SPDX-License-Identifier: Apache-2.0
"""Where the neurons that a ratio allows are spent: more of them in late denoise steps and early layers.

An error of an early step is seen, and partly undone, by the steps after it; that of the last step is in the action.
An error of an early layer passes through all layers after it. At equal cost a tilted spread moves actions less than an
even one (docs/performance.md); beyond the paper.
"""

from __future__ import annotations

import math
from functools import lru_cache

TILE = 64  # rows and neurons fill whole GPU tiles where the model is large enough for tiles to matter
Counts = tuple[tuple[int, ...], ...]  # neurons evaluated, [mask group][expert layer]


def even(count: int, groups: int, layers: int) -> Counts:
    """The same number everywhere."""
    return ((count,) * layers,) * groups


def neuron_count(ratio: float, neurons: int) -> int:
    """ceil(ratio * neurons), at least one, raised to whole tiles where the layer is large."""
    count = min(max(math.ceil(ratio * neurons), 1), neurons)
    return min(math.ceil(count / TILE) * TILE, neurons) if neurons >= 16 * TILE else count


@lru_cache(maxsize=64)
def spread(ratio: float, neurons: int, limit: float, steps: tuple[int, ...], layers: int, step_tilt: float,
           layer_tilt: float) -> Counts:
    """How many of ``neurons`` each layer evaluates in each group of steps, ``ratio`` of them on average.

    steps: how many steps each group has. Shares run linearly from 1 - step_tilt in the first group to 1 + step_tilt in
    the last, and from 1 + layer_tilt in the first layer to 1 - layer_tilt in the last, times a common factor; tilts lie
    below one. A reference ranks no more than the share ``limit``, so a share above it is every neuron instead; where no
    factor meets the ratio because of that, fewer are evaluated.
    """
    if neuron_count(ratio, neurons) == neurons:
        return even(neurons, len(steps), layers)
    weights = [[_tilted(step_tilt, group, len(steps)) * _tilted(-layer_tilt, layer, layers) for layer in range(layers)]
               for group in range(len(steps))]
    low, high = 0.0, 1.0 / min(map(min, weights))
    for _ in range(40):  # the mean grows with the factor, in jumps where a share passes the limit
        factor = (low + high) / 2
        shares = [[_possible(factor * weight, limit) for weight in row] for row in weights]
        mean = sum(count * sum(row) for count, row in zip(steps, shares)) / (sum(steps) * layers)
        low, high = (factor, high) if mean <= ratio + 1e-9 else (low, factor)
    return tuple(tuple(neuron_count(round(_possible(low * weight, limit), 6), neurons) for weight in row)
                 for row in weights)


def _tilted(tilt: float, place: int, places: int) -> float:
    return 1.0 if places == 1 else 1 + tilt * (2 * place / (places - 1) - 1)


def _possible(share: float, limit: float) -> float:
    return share if share <= limit else 1.0
