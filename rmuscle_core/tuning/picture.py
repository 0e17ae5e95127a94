# SPDX-License-Identifier: Apache-2.0
"""The sweep in one picture: what every setting costs and how far it moves actions."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rmuscle_core.tuning.choose import Choice, pareto
from rmuscle_core.tuning.sweep import Sweep


def draw(path: Path, sweep: Sweep, error: np.ndarray, choice: Choice, budget: float, cost_label: str) -> None:
    """Write a PNG: one dot per setting of the chosen window, coloured by neuron ratio, and the front."""
    import matplotlib

    matplotlib.use('Agg')  # no display on a robot
    from matplotlib import pyplot as plt

    w = choice.index[0]
    figure, axes = plt.subplots(figsize=(8, 5), layout='constrained')
    speedup = sweep.dense_ms / sweep.milliseconds[w]
    colours = plt.cm.viridis(np.linspace(0, 0.9, len(sweep.grid.neurons)))
    for n, ratio in enumerate(sweep.grid.neurons):
        axes.plot(speedup[:, n], error[w, :, n], 'o-', color=colours[n], linewidth=0.8, markersize=4,
                  label=f'neuron_ratio {ratio:g}')
        for t, tokens in enumerate(sweep.grid.tokens):
            axes.annotate(f'{tokens:g}', (speedup[t, n], error[w, t, n]), fontsize=6, xytext=(2, 2),
                          textcoords='offset points')
    front = pareto(sweep.milliseconds[w], error[w])
    axes.plot([speedup[i] for i in front], [error[w][i] for i in front], color='#c2410c', linewidth=2, alpha=0.5,
              label='no setting is better in both')
    _, t, n = choice.index
    axes.plot(speedup[t, n], error[w, t, n], '*', markersize=18, color='#c2410c',
              label=f'chosen: {choice.token_ratio:g} / {choice.neuron_ratio:g}')
    axes.axhline(budget, linestyle=':', color='#555', label=f'budget {budget:g}')
    axes.set(xlabel=f'speedup over dense ({cost_label})', ylabel='action error, half ranges',
             title=f'Numbers: token_ratio; window {choice.window}')
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
