# SPDX-License-Identifier: Apache-2.0
"""Tables for people and one JSON line for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from rmuscle_core.bench.timing import Comparison, summary


def comparison_rows(comparison: Comparison) -> dict[str, dict[str, object]]:
    """Work -> milliseconds, median per stage, and speedup over the baseline."""
    rows: dict[str, dict[str, object]] = {}
    for name, samples in comparison.milliseconds.items():
        rows[name] = {'ms': summary(samples)}
        if comparison.stages[name]:
            rows[name]['stages_ms'] = {stage: summary(s)['p50'] for stage, s in comparison.stages[name].items()}
        if name in comparison.speedups:
            rows[name]['speedup'] = summary(comparison.speedups[name])
    return rows


def speedups(rows: dict[str, dict], prefix: str = 'speedup') -> dict[str, float]:
    """Flat keys such as 'speedup.full.default' -> median speedup."""
    return {f'{prefix}.{name}': row['speedup']['p50'] for name, row in rows.items() if 'speedup' in row}


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """First column to the left, numbers to the right."""
    table = Table(title=title, title_justify='left')
    for number, column in enumerate(columns):
        table.add_column(column, justify='right' if number else 'left', no_wrap=True)
    for row in rows:
        table.add_row(*(_cell(value) for value in row))
    width = None if sys.stdout.isatty() else 160
    Console(width=width).print(table)


def print_comparison(title: str, rows: dict[str, dict]) -> None:
    """Work, p50, p95, speedup with quartiles, then whatever else the rows hold."""
    stages = list(dict.fromkeys(stage for row in rows.values() for stage in row.get('stages_ms', ())))
    known, table = ('ms', 'stages_ms', 'speedup'), []
    extra = list(dict.fromkeys(key for row in rows.values() for key in row if key not in known))
    for name, row in rows.items():
        gain = row.get('speedup')
        table.append([name, row['ms']['p50'], row['ms']['p95'],
                      f'{gain["p50"]:.2f} ({gain["q25"]:.2f}-{gain["q75"]:.2f})' if gain else '1',
                      *(row.get('stages_ms', {}).get(stage) for stage in stages), *(row.get(key) for key in extra)])
    print_table(title, ['', 'p50 ms', 'p95 ms', 'speedup (quartiles)', *(f'{s} ms' for s in stages), *extra], table)


def finish(result: dict[str, object], as_json: bool, out: Path | None) -> None:
    """Write the result to a file and, as the last line, to standard output, where asked for."""
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + '\n')
    if as_json:
        print(json.dumps(result))


def progress_bar() -> Progress:
    """A bar on standard error, for people only."""
    return Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True)


def _cell(value: object) -> str:
    if value is None:
        return ''
    return f'{value:.4g}' if isinstance(value, float) and abs(value) < 1e4 else f'{value:.0f}' if isinstance(
        value, float) else str(value)
