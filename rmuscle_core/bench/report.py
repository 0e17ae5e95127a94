# SPDX-License-Identifier: Apache-2.0
"""Tables for people and one JSON line for programs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from rmuscle_core.bench.timing import Comparison, summary

UNLIMITED = 10_000  # columns of a table that goes to a file or a program
EVERY_S = 5.0  # between two lines about progress


def comparison_rows(comparison: Comparison, cpu: bool) -> dict[str, dict[str, object]]:
    """Work -> milliseconds, median per stage, and speedup over the baseline, for a CPU also in CPU time."""
    rows: dict[str, dict[str, object]] = {}
    for name, samples in comparison.milliseconds.items():
        rows[name] = {'ms': summary(samples)}
        if comparison.stages[name]:
            rows[name]['stages_ms'] = {stage: summary(s)['p50'] for stage, s in comparison.stages[name].items()}
        if comparison.speedups[name]:
            rows[name]['speedup'] = summary(comparison.speedups[name])
            if cpu:
                rows[name]['cpu_speedup'] = summary(comparison.cpu_speedups[name])
    return rows


def speedups(rows: dict[str, dict], kind: str = '') -> dict[str, float]:
    """Flat keys such as 'speedup.full.default' or 'cpu_speedup.prefix.0.5' -> median speedup."""
    return {'.'.join(filter(None, (measure, kind, name))): row[measure]['p50']
            for measure in ('speedup', 'cpu_speedup') for name, row in rows.items() if measure in row}


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """First column to the left, numbers to the right. No cell is cut: in a narrow terminal they take more lines."""
    terminal = sys.stdout.isatty()
    table = Table(title=title, title_justify='left')
    for number, column in enumerate(columns):
        table.add_column(column, justify='right' if number else 'left', no_wrap=not terminal, overflow='fold')
    for row in rows:
        table.add_row(*(_cell(value) for value in row))
    Console(width=None if terminal else UNLIMITED).print(table)


def print_comparison(title: str, rows: dict[str, dict]) -> None:
    """Work, p50, p95, speedup with quartiles, then whatever else the rows hold."""
    stages = list(dict.fromkeys(stage for row in rows.values() for stage in row.get('stages_ms', ())))
    gains = [key for key in ('speedup', 'cpu_speedup') if any(key in row for row in rows.values())]
    extra = list(dict.fromkeys(key for row in rows.values() for key in row if key not in ('ms', 'stages_ms', *gains)))
    table = [[name, row['ms']['p50'], row['ms']['p95'], *(_gain(row.get(key)) for key in gains),
              *(row.get('stages_ms', {}).get(stage) for stage in stages), *(row.get(key) for key in extra)]
             for name, row in rows.items()]
    titles = {'speedup': 'speedup (quartiles)', 'cpu_speedup': 'in CPU time'}
    print_table(title, ['', 'p50 ms', 'p95 ms', *(titles[key] for key in gains), *(f'{s} ms' for s in stages), *extra],
                table)


def _gain(speedup: dict[str, float] | None) -> str:
    return f'{speedup["p50"]:.2f} ({speedup["q25"]:.2f}-{speedup["q75"]:.2f})' if speedup else '1'


def finish(result: dict[str, object], as_json: bool, out: Path | None) -> None:
    """Write the result to a file and, as the last line, to standard output, where asked for."""
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + '\n')
    if as_json:
        print(json.dumps(result))


def progress_bar() -> Progress:
    """How far the work is, on standard error: a bar in a terminal, a line every few seconds anywhere else."""
    if sys.stderr.isatty():
        return Progress(console=Console(stderr=True), transient=True)
    return _Lines(disable=True)


class _Lines(Progress):
    """For logs. Work that is done within seconds says nothing."""

    def __enter__(self) -> _Lines:
        self._began = self._said = time.monotonic()
        return super().__enter__()

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._say(task_id)

    def update(self, task_id: TaskID, **changed: object) -> None:
        super().update(task_id, **changed)
        self._say(task_id)

    def _say(self, task_id: TaskID) -> None:
        task, now = self.tasks[self.task_ids.index(task_id)], time.monotonic()
        if now - self._said >= EVERY_S:
            self._said = now
            of = '' if task.total is None else f' of {task.total:.0f}'
            print(f'{task.description}: {task.completed:.0f}{of}, {now - self._began:.0f} s', file=sys.stderr,
                  flush=True)


def _cell(value: object) -> str:
    if value is None:
        return ''
    return f'{value:.4g}' if isinstance(value, float) and abs(value) < 1e4 else f'{value:.0f}' if isinstance(
        value, float) else str(value)
