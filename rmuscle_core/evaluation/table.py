# SPDX-License-Identifier: Apache-2.0
"""From finished episodes to the table: success with its interval, paired with dense, and what a call costs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from rmuscle_core.bench.report import print_table
from rmuscle_core.evaluation.rows import BASELINE, BY_NAME
from rmuscle_core.evaluation.statistics import mcnemar, paired_difference, wilson_interval


def summarise(lines: Sequence[dict]) -> dict[str, dict]:
    """Row -> plain numbers, in the order of the lines. Lines of rows and seeds as ``runner.evaluate`` returns them."""
    by_row: dict[str, dict[int, dict]] = {}
    for line in lines:
        by_row.setdefault(line['row'], {})[line['seed']] = line
    return {name: _row(found, by_row.get(BASELINE, {})) | {'group': BY_NAME[name].group, 'note': BY_NAME[name].note}
            for name, found in by_row.items()}


def _row(found: dict[int, dict], dense: dict[int, dict]) -> dict:
    successes = sum(line['success'] for line in found.values())
    calls = sum(line['calls'] for line in found.values())
    paths = sum((Counter(line['paths']) for line in found.values()), Counter())
    result = {
        'episodes': len(found), 'successes': successes, 'interval': wilson_interval(successes, len(found)),
        'failed_seeds': [seed for seed, line in found.items() if not line['success']],
        'error': _mean(line['error'] for line in found.values()),
        'similarity': _mean(line['similarity'] for line in found.values()),
        'calls_per_episode': calls / len(found), 'served': {path: n / calls for path, n in paths.items()},
        'cpu_ms': _mean(line['cpu_ms'] for line in found.values())}
    seeds = [seed for seed in found if seed in dense]
    if seeds:
        pairs = [dense[s]['success'] for s in seeds], [found[s]['success'] for s in seeds]
        only_dense, only_this, p = mcnemar(*pairs)
        similar = [path_similarity(np.array(dense[s]['states']), np.array(found[s]['states'])) for s in seeds]
        result |= {'difference': paired_difference(*pairs), 'only_dense': only_dense, 'only_this': only_this, 'p': p,
                   'path_similarity': _mean(similar),
                   'speedup': _mean(dense[s]['cpu_ms'] for s in seeds) / result['cpu_ms']}
    return result


def path_similarity(first: np.ndarray, second: np.ndarray) -> float | None:
    """Cosine of two joint paths [calls, S] over their common calls, both relative to where the first begins."""
    common = min(len(first), len(second))
    a, b = (path[1:common] - first[0] for path in (first, second))
    norm = np.linalg.norm(a) * np.linalg.norm(b)
    return float((a * b).sum() / norm) if norm > 0 else None


def _mean(values) -> float | None:
    known = [v for v in values if v is not None and math.isfinite(v)]
    return float(np.mean(known)) if known else None


def show(title: str, summary: dict[str, dict]) -> None:
    """Print one table per group of rows."""
    columns = ['', 'success', '95 %', 'vs dense', 'p', 'action error', 'path', 'library / previous / dense', 'CPU ms',
               'speedup']
    for group in dict.fromkeys(row['group'] for row in summary.values()):
        print_table(f'{title}: {group}', columns, [_cells(name, row) for name, row in summary.items()
                                                   if row['group'] == group])


def _cells(name: str, row: dict) -> list[object]:
    low, high = row['interval']
    served = ' / '.join(f'{row["served"].get(path, 0):.0%}' for path in ('library', 'previous_call', 'dense'))
    paired = None
    if 'difference' in row:
        change, least, most = (100 * value for value in row['difference'])
        paired = f'{change:+.1f} ({least:+.1f} to {most:+.1f})'
    return [name, f'{row["successes"]} of {row["episodes"]}', f'{100 * low:.0f}-{100 * high:.0f}', paired, row.get('p'),
            row['error'], row.get('path_similarity'), served, row['cpu_ms'], row.get('speedup')]
