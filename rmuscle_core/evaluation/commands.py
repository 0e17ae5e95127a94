# SPDX-License-Identifier: Apache-2.0
"""``rmuscle eval``: does the task still succeed, and against what."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from rmuscle_core.errors import SettingsError
from rmuscle_core.options import output_file, output_folder, whole

SEEDS, QUICK_SEEDS = 200, 24


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add ``eval``; the simulator is imported when it runs."""
    parser = subparsers.add_parser(
        'eval', help='closed-loop success of settings, other methods and controls',
        description='Runs every row on the same seeds in the simulated cell and compares it with dense. Takes hours '
                    'with all rows; interrupted, the same command goes on where it was.')
    parser.add_argument('--task', default='transfer_cube', help='simulated task (default: %(default)s)')
    parser.add_argument('--checkpoint', type=Path, help='policy for it (default: the one shipped for the task)')
    which = parser.add_mutually_exclusive_group()
    which.add_argument('--rows', nargs='+', metavar='ROW', help='rows or groups of rows; --list names them '
                       '(default: all)')
    which.add_argument('--quick', action='store_true', help='only dense, default and the previous call as reference')
    parser.add_argument('--list', action='store_true', help='print the rows and stop')
    parser.add_argument('--episodes', type=whole(1, 10**6), metavar='N', help='episodes per row, each from a seed of '
                        f'its own (default: {SEEDS}, {QUICK_SEEDS} with --quick)')
    parser.add_argument('--seed', type=whole(0), default=1000, help='first seed of the episodes (default: %(default)s)')
    parser.add_argument('--library-seed', type=whole(0), default=5000, metavar='SEED', help='first seed of the '
                        'episodes in the library (default: %(default)s)')
    parser.add_argument('--errors', type=whole(0), default=20, metavar='N', help='episodes of each row whose calls are '
                        'repeated densely, to tell the action error (default: %(default)s)')
    parser.add_argument('--processes', type=whole(1, 4096), default=os.cpu_count(), metavar='N', help='episodes at a '
                        'time (default: one for each CPU)')
    parser.add_argument('--out', type=output_folder, help='folder of results, where a run is resumed (default: '
                        'out/eval/TASK)')
    parser.add_argument('--json', type=output_file, metavar='FILE', help='also write the summary to this JSON file')
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run what is missing, print the table, write the summary."""
    import torch

    from rmuscle_core.bench import report
    from rmuscle_core.bench.device import describe
    from rmuscle_core.evaluation import rows, runner, table
    from rmuscle_core.model import load_config

    chosen = _rows(args, rows)
    if args.list:
        for row in chosen:  # plain lines: names are to be copied, so nothing may be cut
            settings = ', '.join(f'{name} {value}' for name, value in row.settings.items()) or 'the defaults'
            print(f'{row.name:24s}{row.group:16s}{settings}{f" ({row.note})" if row.note else ""}')
        return 0
    checkpoint, out = args.checkpoint or shipped_policy(args.task), args.out or Path('out', 'eval', args.task)
    load_config(checkpoint)  # a folder that is none leaves no results behind
    plan = runner.Plan(args.task, checkpoint, out, args.errors, args.library_seed)
    count = args.episodes or (QUICK_SEEDS if args.quick else SEEDS)
    seeds = range(args.seed, args.seed + count)
    with report.progress_bar() as bar:
        task = bar.add_task('episodes', total=len(chosen) * count)
        lines = runner.evaluate(plan, chosen, seeds, args.processes,
                                lambda done, total: bar.update(task, completed=done))
    summary = table.summarise(lines)
    table.show(f'{args.task}, seeds {seeds[0]} to {seeds[-1]}', summary)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        command = ' '.join(['rmuscle', *sys.argv[1:]])
        args.json.write_text(json.dumps({'command': command, 'machine': describe(torch.device('cpu')),
                                         'task': args.task, 'seeds': [seeds[0], seeds[-1]],
                                         'library_seed': args.library_seed, 'rows': summary}, indent=1) + '\n')
    return 0


def _rows(args: argparse.Namespace, rows):
    if args.quick:
        return [rows.BY_NAME[name] for name in rows.QUICK]
    wanted = set(args.rows or ())
    unknown = wanted - {row.name for row in rows.ROWS} - {row.group for row in rows.ROWS}
    if unknown:
        raise SettingsError(f'--rows: there is no row {min(unknown)!r}; "rmuscle eval --list" names them')
    chosen = [row for row in rows.ROWS if not wanted or row.name in wanted or row.group in wanted]
    return chosen if chosen[0].name == rows.BASELINE else [rows.BY_NAME[rows.BASELINE], *chosen]


def shipped_policy(task: str) -> Path:
    """Directory of the policy that comes with the project; SettingsError where there is none."""
    from rmuscle_core.shipped import shipped
    from rmuscle_core.workcell.tasks import TASKS

    if task not in TASKS:
        raise SettingsError(f'--task: there is no task {task!r}; known are {", ".join(TASKS)}')
    found = shipped(f'policy/{TASKS[task].policy}')
    if found is None:
        raise SettingsError(f'the policy for {task} is not installed here; name one with --checkpoint')
    return found
