# SPDX-License-Identifier: Apache-2.0
"""The demo at a glance: what the cameras saw, which patches were recomputed, and the motion with and without caches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use('Agg')
import matplotlib.pyplot as plt
import numpy as np

from rmuscle_ros.demo.compare import Illustration
from rmuscle_ros.demo.session import Run

DENSE, CACHED = '#6b7280', '#d9480f'
SHOWN_JOINTS = 4  # those that move most


def draw(path: Path, picture: Illustration, dense: Run, cached: Run, joints: Sequence[str], summary: dict) -> None:
    """Write the PNG."""
    figure = plt.figure(figsize=(12, 8), layout='constrained')
    upper, lower = figure.subfigures(2, 1, height_ratios=(1, 1))
    for axes, (camera, image) in zip(np.atleast_1d(upper.subplots(1, len(picture.views))), picture.views.items(),
                                     strict=True):
        _view(axes, camera, image, picture.layers_recomputed[camera] / picture.layers)
    upper.suptitle('One cached call: brighter patches were recomputed in more layers, dark ones reused', fontsize=11)
    _motion(lower, dense, cached, joints)
    figure.suptitle(f'{summary["cached"]["successes"]} of {summary["cached"]["episodes"]} cached and '
                    f'{summary["dense"]["successes"]} of {summary["dense"]["episodes"]} dense episodes succeeded; '
                    f'{summary["dense_ms_per_call"]:.0f} ms a call dense, {summary["cached_ms_per_call"]:.0f} cached',
                    fontsize=12)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _view(axes: plt.Axes, camera: str, image: np.ndarray, share: np.ndarray) -> None:
    height, width = image.shape[:2]
    shade = np.kron(share, np.ones((height // share.shape[0], width // share.shape[1])))[..., None]
    axes.imshow((image * (0.35 + 0.65 * shade)).astype(np.uint8), interpolation='nearest')
    axes.set_title(f'{camera}: {share.mean():.0%} recomputed', fontsize=10)
    axes.set_axis_off()


def _motion(figure, dense: Run, cached: Run, joints: Sequence[str]) -> None:
    """Measured joint positions at the calls of one seed, dense and cached."""
    paths = [np.stack([call.observation.state for call in run.calls]) for run in (dense, cached)]
    order = np.argsort(-np.ptp(paths[0], axis=0))[:SHOWN_JOINTS]
    for axes, joint in zip(figure.subplots(1, len(order)), order, strict=True):
        for positions, colour, label in zip(paths, (DENSE, CACHED), ('dense', 'cached'), strict=True):
            axes.plot(positions[:, joint], '--' if label == 'cached' else '-', color=colour, label=label, marker='o',
                      markersize=3)
        axes.set_title(joints[joint], fontsize=10)
        axes.set_xlabel('policy call')
    figure.axes[0].set_ylabel('joint position (rad)')
    figure.axes[0].legend(fontsize=9)
    figure.suptitle(f'Joint positions seen by the policy, seed {dense.result["seed"]}', fontsize=11)
