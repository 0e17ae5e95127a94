# SPDX-License-Identifier: Apache-2.0
"""Pictures of a replay as PNG bytes; the report carries them inside."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from PIL import Image

matplotlib.use('Agg')  # no display on a robot
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from rmuscle_core.replay.calls import ReplayedCall

DENSE, CACHED = '#6b7280', '#1b6ca8'
PATHS = {'library': (CACHED, 'o'), 'previous_call': ('#b45309', '^'), 'dense': (DENSE, 'x')}
SHOWN_JOINTS = 4
LARGEST_SIDE = 320  # pixels of a camera's picture in the report
DARKEST = 0.35  # of the brightness of a patch that every layer reused


def over_time(calls: Sequence[dict], min_similarity: float) -> bytes:
    """Similarity and path, action difference, latency, call by call; lines divide the episodes. calls: 'by_call' of
    measures.summarise."""
    figure, panels = plt.subplots(3, 1, figsize=(9, 6), sharex=True, layout='constrained')
    numbers = np.arange(len(calls))
    for path, (colour, marker) in PATHS.items():
        chosen = [i for i in numbers if calls[i]['path'] == path]
        panels[0].scatter(chosen, [calls[i]['similarity'] or 0.0 for i in chosen], s=16, color=colour, marker=marker,
                          label=f'{path} ({len(chosen)})')
    panels[0].axhline(min_similarity, color=DENSE, linestyle=':', linewidth=1, label='min_similarity')
    panels[0].set(ylabel='similarity', ylim=(-0.05, 1.05))
    panels[1].bar(numbers, [call['difference'] for call in calls], color=CACHED)
    panels[1].set(ylabel='action difference')
    for kind, colour in (('dense', DENSE), ('cached', CACHED)):
        panels[2].plot(numbers, [call[f'{kind}_ms'] for call in calls], '.-', color=colour, linewidth=1, label=kind)
    panels[2].set(ylabel='ms a call', xlabel='policy call, episodes divided by lines', ylim=(0, None))
    for i in numbers[1:]:
        if calls[i]['episode'] != calls[i - 1]['episode']:
            for panel in panels:
                panel.axvline(i - 0.5, color='#d0d0d0', linewidth=0.8)
    for panel in (panels[0], panels[2]):
        panel.legend(fontsize=8, ncols=4)
    return _png(figure)


def histogram(values: Mapping[str, Sequence[float]], label: str) -> bytes:
    """Dense beside cached; the highest hundredth of the values is left out, so that one outlier hides nothing."""
    figure, axes = plt.subplots(figsize=(4.5, 2.8), layout='constrained')
    everything = np.concatenate([np.asarray(v, float) for v in values.values()])
    edges = np.linspace(0, np.percentile(everything, 99) * 1.05 + 1e-9, 30) if len(everything) else 10
    for kind, colour in (('dense', DENSE), ('cached', CACHED)):
        axes.hist(np.asarray(values[kind], float), edges, histtype='step', color=colour, label=kind, linewidth=1.5)
    axes.set(xlabel=label, ylabel='count')
    axes.legend(fontsize=8)
    return _png(figure)


def views(shown: ReplayedCall, reference: Mapping[str, np.ndarray]) -> dict[str, dict[str, bytes]]:
    """Row -> camera -> picture: now; what was recomputed, where the engine tells; the reference, where at hand."""
    rows = {'now': shown.images, 'reference': {camera: reference[camera] for camera in shown.images
                                               if camera in reference}}
    if shown.recomputed:
        rows['recomputed'] = {camera: shaded(image, shown.recomputed[camera]) for camera, image in shown.images.items()}
    order = ('now', 'recomputed', 'reference')
    return {row: {camera: _picture(image) for camera, image in rows[row].items()} for row in order if rows.get(row)}


def chunks(shown: ReplayedCall, names: Sequence[str], scale: np.ndarray, executed: int) -> dict[str, bytes]:
    """The joints that differ most in the executed steps, in half ranges -> both chunks, the executed steps shaded."""
    moved = (np.abs(shown.cached - shown.dense)[:executed] / scale).mean(0)
    return {names[joint]: _chunk(shown.dense[:, joint], shown.cached[:, joint], executed)
            for joint in np.argsort(-moved)[:SHOWN_JOINTS]}


def _chunk(dense: np.ndarray, cached: np.ndarray, executed: int) -> bytes:
    figure, axes = plt.subplots(figsize=(2.3, 1.7))
    figure.subplots_adjust(left=0.2, right=0.98, top=0.97, bottom=0.13)
    axes.axvspan(0, executed - 1, color='#eef1f4')
    axes.plot(dense, color=DENSE)
    axes.plot(cached, color=CACHED)
    axes.tick_params(labelsize=7)
    return _png(figure)


def shaded(image: np.ndarray, share: np.ndarray) -> np.ndarray:
    """The picture, dark where nothing was recomputed; share [rows, columns] of the patches, stretched over it."""
    height, width = image.shape[:2]
    rows = np.minimum(np.arange(height) * share.shape[0] // height, share.shape[0] - 1)
    columns = np.minimum(np.arange(width) * share.shape[1] // width, share.shape[1] - 1)
    return (image * (DARKEST + (1 - DARKEST) * share[np.ix_(rows, columns)][..., None])).astype(np.uint8)


def _picture(image: np.ndarray) -> bytes:
    buffer, small = io.BytesIO(), Image.fromarray(image)
    small.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
    small.save(buffer, 'png')
    return buffer.getvalue()


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=150)
    plt.close(figure)
    return buffer.getvalue()
