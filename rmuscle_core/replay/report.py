# SPDX-License-Identifier: Apache-2.0
"""Write what a replay found: report.html, report.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from rmuscle_core.replay import figures, page
from rmuscle_core.replay.calls import ReplayedCall
from rmuscle_core.replay.measures import boundary_jumps, per_call_difference


def write(out: Path, summary: dict, calls: Sequence[ReplayedCall], scale: np.ndarray,
          reference_images: Callable[[str], Mapping[str, np.ndarray]]) -> None:
    """summary: as for ``page.render``. reference_images(name): the pictures of a reference, {} where unknown."""
    executed, joints = summary['executed_steps'], list(summary['joints'])
    milliseconds = {'dense': [c.dense_ms for c in calls], 'cached': [c.report.milliseconds['total'] for c in calls]}
    pictures = {'joints': figures.joints(summary),
                'time': figures.over_time(calls, per_call_difference(calls, executed, scale)),
                'distributions': figures.distributions(milliseconds, boundary_jumps(calls, executed, scale))}
    by_name = {(call.episode, call.number): call for call in calls}
    worst = [(account, figures.call(by_name[account['episode'], account['call']],
                                    reference_images(account['reference']), joints))
             for account in summary['worst_calls']]
    out.mkdir(parents=True, exist_ok=True)
    (out / 'report.html').write_text(page.render(summary, pictures, worst), encoding='utf-8')
    (out / 'report.json').write_text(json.dumps(summary, indent=1) + '\n')
