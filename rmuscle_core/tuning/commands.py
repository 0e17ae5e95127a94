# SPDX-License-Identifier: Apache-2.0
"""``rmuscle tune``: which ratios do these executions allow?"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rmuscle_core.importing.options import EPISODES, add_source_options, source_of
from rmuscle_core.options import add_device, output_folder, positive

if TYPE_CHECKING:
    from rmuscle_core.tuning.choose import Choice

DEVICES = {'rtx4090': 'RTX 4090', 'thor': 'Jetson AGX Thor', 'h200': 'H200'}
EXCEEDED = 1


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add ``tune``."""
    parser = subparsers.add_parser(
        'tune', help='choose token_ratio, neuron_ratio and window on recorded executions',
        description='The first half of the episodes become references, settings are chosen on half of the others and '
                    'checked on the rest. Exit code 1 when the held-out error exceeds the budget.')
    parser.add_argument('episodes', type=Path, help=EPISODES)
    parser.add_argument('--checkpoint', type=Path, required=True, help='LeRobot or openpi checkpoint directory')
    parser.add_argument('--budget', type=positive, default=0.03, help='mean |cached - dense| of the executed actions, '
                        'in half ranges of those seen in training (default: %(default)s)')
    parser.add_argument('--predict', choices=tuple(DEVICES), help='cost by the roofline of that device instead of '
                        'measured on this one')
    add_device(parser)
    parser.add_argument('--out', type=output_folder, default=Path('out/tune'), help='folder of tuned.yaml, tune.json, '
                        'tune.png (default: %(default)s)')
    add_source_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Sweep, choose, check, write."""
    from rmuscle_core.bench.report import progress_bar
    from rmuscle_core.bench.roofline import KNOWN
    from rmuscle_core.model import load_config
    from rmuscle_core.replay.session import Session
    from rmuscle_core.settings import Settings
    from rmuscle_core.tuning.choose import bounds, choose
    from rmuscle_core.tuning.picture import draw
    from rmuscle_core.tuning.sweep import Grid, sweep

    with (source_of(args.episodes, args, load_config(args.checkpoint)) as source,
          Session(args.checkpoint, Settings(), list(source), source.execute_steps, args.out, device=args.device,
                  cameras=source.cameras) as session, progress_bar() as bar):
        task = bar.add_task('calls', total=None)
        episodes, skipped = session.prepare()
        found = sweep(session.cached, episodes, Grid(), session.executed, KNOWN[DEVICES[args.predict]] if args.predict
                      else None, lambda done, total: bar.update(task, completed=done, total=total))
    for name, reason in skipped:
        print(f'{name} was skipped: {reason}')
    chosen_on = found.episodes % 2 == 0
    held_out = ~chosen_on if (~chosen_on).any() else chosen_on
    choice = choose(found, chosen_on, args.budget)
    error = bounds(found, chosen_on)[0]
    checked = float(found.errors[(held_out, *choice.index)].mean())
    label = f'predicted for {DEVICES[args.predict]}' if args.predict else 'measured here'
    args.out.mkdir(parents=True, exist_ok=True)
    draw(args.out / 'tune.png', found, error, choice, args.budget, label)
    write_yaml(args.out / 'tuned.yaml', choice, args.budget, checked)
    summary = {**asdict(choice), 'held_out_error': checked, 'budget': args.budget, 'cost': label,
               'speedup': found.dense_ms / choice.milliseconds, 'dense_ms': found.dense_ms,
               'calls': len(found.episodes), 'episodes': len(set(found.episodes.tolist())),
               'grid': asdict(found.grid), 'errors': error.round(5).tolist(),
               'milliseconds': found.milliseconds.round(3).tolist(), 'similarity': found.similarity.round(4).tolist()}
    (args.out / 'tune.json').write_text(json.dumps(summary, indent=1) + '\n')
    print(f'token_ratio {choice.token_ratio:g}, neuron_ratio {choice.neuron_ratio:g}, window {choice.window}: error '
          f'{choice.error:.4f} (bound {choice.bound:.4f}, held out {checked:.4f}, budget {args.budget:g}), speedup '
          f'{summary["speedup"]:.2f} {label}; see {args.out}')
    return EXCEEDED if checked > args.budget else 0


def write_yaml(path: Path, choice: Choice, budget: float, checked: float) -> None:
    """A parameter file for ``ros2 launch``, or ``ros2 param load``."""
    path.write_text(f'# Chosen by "rmuscle tune" for an action error below {budget:g} half ranges; held out: '
                    f'{checked:.4f}.\n/**:\n  ros__parameters:\n    profile: custom\n'
                    f'    token_ratio: {choice.token_ratio}\n    neuron_ratio: {choice.neuron_ratio}\n'
                    f'    window: {choice.window}\n')
