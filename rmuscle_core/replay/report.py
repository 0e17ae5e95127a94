# SPDX-License-Identifier: Apache-2.0
"""Write what a replay found: report.html, report.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from rmuscle_core.replay import figures, page
from rmuscle_core.replay.calls import ReplayedCall
from rmuscle_core.replay.measures import boundary_jumps


def write(out: Path, summary: dict, calls: Sequence[ReplayedCall], scale: np.ndarray,
          pictures_of: Callable[[Iterable[str]], Mapping[str, Mapping[str, np.ndarray]]]) -> None:
    """summary: as for ``page.render``. pictures_of(references): the pictures of those whose episode is at hand."""
    executed, joints = summary['executed_steps'], list(summary['joints'])
    milliseconds = {kind: [call[f'{kind}_ms'] for call in summary['by_call']] for kind in ('dense', 'cached')}
    jumps = boundary_jumps(calls, executed, scale)
    pictures = {'time': figures.over_time(summary['by_call'], summary['min_similarity']),
                'latency': figures.histogram(milliseconds, 'ms a call'),
                'jumps': figures.histogram(jumps, 'jump between chunks, half ranges')}
    by_name = {(call.episode, call.number): call for call in calls}
    references = pictures_of([account['reference'] for account in summary['worst_calls']])
    worst = []
    for account in summary['worst_calls']:
        call = by_name[account['episode'], account['call']]
        views = figures.views(call, references.get(account['reference'], {}))
        worst.append(page.Shown(account, views, figures.chunks(call, joints, scale, executed)))
    out.mkdir(parents=True, exist_ok=True)
    (out / 'report.html').write_text(page.render(summary, pictures, worst), encoding='utf-8')
    (out / 'report.json').write_text(json.dumps(summary, indent=1) + '\n')
