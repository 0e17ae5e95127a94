# SPDX-License-Identifier: Apache-2.0
"""The sweep in one picture: what every setting costs and how far it moves actions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rmuscle_core.tuning.choose import Choice, pareto
from rmuscle_core.tuning.sweep import Sweep

LABEL_WIDTH = 0.1  # of the axis


def draw(path: Path, sweep: Sweep, error: np.ndarray, choice: Choice, checked: float | None, budget: float,
         cost_label: str) -> None:
    """Write a PNG: one dot per setting of the chosen window, the front of the best ones, the chosen one with its bound
    and, where episodes were held out, its error on those."""
    import matplotlib

    matplotlib.use('Agg')  # no display on a robot
    from matplotlib import pyplot as plt

    w, t, n = choice.index
    figure, axes = plt.subplots(figsize=(8, 5), layout='constrained')
    speedup, grid = sweep.dense_ms / sweep.milliseconds[w], sweep.grid
    for number, colour in enumerate(plt.cm.viridis(np.linspace(0, 0.9, len(grid.neurons)))):
        axes.plot(speedup[:, number], error[w, :, number], 'o-', color=colour, linewidth=0.8, markersize=4,
                  label=f'neuron_ratio {grid.neurons[number]:g}')
    front = pareto(sweep.milliseconds[w], error[w])
    axes.plot([speedup[i] for i in front], [error[w][i] for i in front], color='#c2410c', linewidth=2, alpha=0.5,
              label='none is better in both')
    for token, neuron in apart(front, speedup):
        axes.annotate(f'{grid.tokens[token]:g} / {grid.neurons[neuron]:g}', (speedup[token, neuron],
                      error[w, token, neuron]), fontsize=7, xytext=(5, -10), textcoords='offset points')
    axes.plot([speedup[t, n]] * 2, [choice.error, choice.bound], '_-', color='#c2410c', markersize=10,
              label='its upper bound')
    axes.plot(speedup[t, n], choice.error, '*', markersize=18, color='#c2410c',
              label=f'chosen: {choice.token_ratio:g} / {choice.neuron_ratio:g}')
    if checked is not None:
        axes.plot(speedup[t, n], checked, 'kx', markersize=8, label='its error on held-out episodes')
    axes.axhline(budget, linestyle=':', color='#555', label=f'budget {budget:g}')
    axes.set(xlabel=f'speedup of a call over dense ({cost_label})', ylabel='action error, half ranges',
             title=f'Labels: token_ratio / neuron_ratio. Each line: token_ratio {max(grid.tokens):g} to '
                   f'{min(grid.tokens):g}. Window {choice.window}')
    axes.title.set_fontsize(10)
    axes.margins(x=0.15)
    axes.legend(fontsize=8, loc='center left', bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def apart(front: Sequence[tuple[int, int]], speedup: np.ndarray) -> list[tuple[int, int]]:
    """Those of the front whose labels do not cover each other, the fastest first; speedup [tokens, neurons]."""
    kept: list[tuple[int, int]] = []
    for index in front:
        if not kept or speedup[kept[-1]] - speedup[index] > LABEL_WIDTH * np.ptp(speedup):
            kept.append(index)
    return kept
