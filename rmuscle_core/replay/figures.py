# SPDX-License-Identifier: Apache-2.0
"""Pictures of a replay as PNG bytes; the report carries them inside."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np

matplotlib.use('Agg')  # no display on a robot
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from rmuscle_core.replay.calls import ReplayedCall

DENSE, CACHED, ALERT = '#7a828c', '#1b6ca8', '#c2410c'
PATHS = {'library': CACHED, 'previous_call': '#7fb2d9', 'dense': DENSE}
SHOWN_JOINTS = 4


def joints(summary: dict) -> bytes:
    """Mean and largest difference per joint, as a share of its half range."""
    names = list(summary['joints'])
    mean, most = ([summary['joints'][n][key] / summary['joints'][n]['half_range'] for n in names]
                  for key in ('mean', 'max'))
    figure, axes = plt.subplots(figsize=(9, 0.6 + 0.26 * len(names)), layout='constrained')
    rows = np.arange(len(names))
    axes.barh(rows, most, color='#cfe0ee', label='largest')
    axes.barh(rows, mean, color=CACHED, label='mean')
    axes.set_yticks(rows, names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel('|cached - dense| / half range')
    axes.legend(fontsize=8)
    return _png(figure)


def over_time(calls: Sequence[ReplayedCall], per_call: np.ndarray) -> bytes:
    """Similarity coloured by path, and the action difference, call by call; lines divide the episodes."""
    figure, (upper, lower) = plt.subplots(2, 1, figsize=(9, 4), sharex=True, layout='constrained')
    numbers = np.arange(len(calls))
    for path, colour in PATHS.items():
        chosen = [i for i in numbers if calls[i].report.path == path]
        heights = [np.nan_to_num(calls[i].report.similarity) for i in chosen]
        upper.scatter(chosen, heights, s=14, color=colour, label=f'{path} ({len(chosen)})')
    upper.set(ylabel='similarity', ylim=(-0.05, 1.05))
    upper.legend(fontsize=8, ncols=3)
    lower.bar(numbers, per_call, color=CACHED)
    lower.set(ylabel='action difference', xlabel='policy call')
    for i in numbers[1:]:
        if calls[i].episode != calls[i - 1].episode:
            for axes in (upper, lower):
                axes.axvline(i - 0.5, color='#d0d0d0', linewidth=0.8)
    return _png(figure)


def distributions(milliseconds: Mapping[str, Sequence[float]], jumps: Mapping[str, np.ndarray]) -> bytes:
    """Histograms of latency and of boundary jumps, dense beside cached."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 2.8), layout='constrained')
    for panel, values, label in ((axes[0], milliseconds, 'ms a call'), (axes[1], jumps, 'boundary jump / half range')):
        everything = np.concatenate([np.asarray(v, float) for v in values.values()])
        edges = np.linspace(0, np.percentile(everything, 99) * 1.05 + 1e-9, 30) if len(everything) else 10
        for kind, colour in (('dense', DENSE), ('cached', CACHED)):
            panel.hist(np.asarray(values[kind], float), edges, histtype='step', color=colour, label=kind, linewidth=1.5)
        panel.set_xlabel(label)
        panel.legend(fontsize=8)
    axes[0].set_ylabel('calls')
    return _png(figure)


def call(shown: ReplayedCall, reference: Mapping[str, np.ndarray], names: Sequence[str]) -> bytes:
    """One call: its views, darker where outputs were reused; the reference's views; the joints that differ most."""
    views, rows = list(shown.images), 1 + bool(reference)
    figure = plt.figure(figsize=(9, 2.3 * rows + 2.2), layout='constrained')
    upper, lower = figure.subfigures(2, 1, height_ratios=(2.3 * rows, 2.2))
    grid = upper.subplots(rows, len(views), squeeze=False)
    for column, camera in enumerate(views):
        _view(grid[0, column], shaded(shown.images[camera], shown.recomputed.get(camera)), f'{camera}, now')
        if reference:
            _view(grid[1, column], reference.get(camera), f'{camera}, reference')
    order = np.argsort(-np.abs(shown.cached - shown.dense).mean(0))[:SHOWN_JOINTS]
    for axes, joint in zip(lower.subplots(1, len(order), squeeze=False)[0], order):
        for kind, colour in (('dense', DENSE), ('cached', CACHED)):
            axes.plot(getattr(shown, kind)[:, joint], color=colour, label=kind)
        axes.set_title(names[joint], fontsize=8)
        axes.tick_params(labelsize=7)
    lower.axes[0].legend(fontsize=7)
    return _png(figure)


def shaded(image: np.ndarray, share: np.ndarray | None) -> np.ndarray:
    """The picture, dark where nothing was recomputed; share [rows, columns] of the patches, stretched over it."""
    if share is None:
        return image
    height, width = image.shape[:2]
    rows = np.minimum(np.arange(height) * share.shape[0] // height, share.shape[0] - 1)
    columns = np.minimum(np.arange(width) * share.shape[1] // width, share.shape[1] - 1)
    return (image * (0.35 + 0.65 * share[np.ix_(rows, columns)][..., None])).astype(np.uint8)


def _view(axes, image: np.ndarray | None, title: str) -> None:
    axes.set_axis_off()
    axes.set_title(title, fontsize=8)
    if image is not None:
        axes.imshow(image, interpolation='nearest')


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=100)
    plt.close(figure)
    return buffer.getvalue()
