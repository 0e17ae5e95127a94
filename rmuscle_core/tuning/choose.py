# SPDX-License-Identifier: Apache-2.0
"""The cheapest setting that stays within the budget, with a margin for having seen only some episodes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rmuscle_core.errors import SettingsError
from rmuscle_core.tuning.sweep import Sweep

ONE_SIDED_95 = 1.645


@dataclass(frozen=True)
class Choice:
    """error: mean over the calls it was chosen on. bound: what 95 % of such recordings would stay below."""

    token_ratio: float
    neuron_ratio: float
    window: int
    error: float
    bound: float
    milliseconds: float
    index: tuple[int, int, int]


def bounds(sweep: Sweep) -> tuple[np.ndarray, np.ndarray]:
    """Mean error and its upper bound, [windows, tokens, neurons].

    Calls of an episode resemble each other, so the standard error is that of episode means.
    """
    means = np.stack([sweep.errors[sweep.episodes == episode].mean(0) for episode in np.unique(sweep.episodes)])
    spread = means.std(0, ddof=1) / np.sqrt(len(means)) if len(means) > 1 else means[0]  # one episode proves little
    return means.mean(0), means.mean(0) + ONE_SIDED_95 * spread


def choose(sweep: Sweep, budget: float) -> Choice:
    """Raises SettingsError when not even the most careful setting keeps the budget."""
    error, bound = bounds(sweep)
    allowed = bound <= budget
    if not allowed.any():
        best = np.unravel_index(bound.argmin(), bound.shape)
        raise SettingsError(f'no setting keeps the error below {budget:g} (the best one is bounded by '
                            f'{bound[best]:.4f}); record more episodes, or allow more')
    cost = np.where(allowed, sweep.milliseconds, np.inf)
    # equal cost: the smaller window, which fills less memory, then the smaller error
    order = sorted(zip(*np.where(cost <= 1.001 * cost.min())), key=lambda i: (i[0], bound[i]))
    return _choice(sweep, error, bound, order[0])


def pareto(milliseconds: np.ndarray, error: np.ndarray) -> list[tuple[int, ...]]:
    """Settings than which none is both cheaper and nearer to dense, cheapest first."""
    front, best = [], np.inf
    for flat in np.lexsort((error.ravel(), milliseconds.ravel())):
        index = np.unravel_index(flat, error.shape)
        if error[index] < best:
            best = error[index]
            front.append(tuple(int(i) for i in index))
    return front


def _choice(sweep: Sweep, error: np.ndarray, bound: np.ndarray, index: tuple[int, ...]) -> Choice:
    w, t, n = (int(i) for i in index)
    grid = sweep.grid
    return Choice(grid.tokens[t], grid.neurons[n], grid.windows[w], float(error[w, t, n]), float(bound[w, t, n]),
                  float(sweep.milliseconds[w, t, n]), (w, t, n))
