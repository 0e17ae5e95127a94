# SPDX-License-Identifier: Apache-2.0
"""``rmuscle tune``: which ratios do these executions allow?"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rmuscle_core.errors import EpisodeError
from rmuscle_core.importing.options import EPISODES, add_source_options, source_of
from rmuscle_core.options import add_device, output_folder, positive

if TYPE_CHECKING:
    from rmuscle_core.importing.episodes import PendingEpisode
    from rmuscle_core.tuning.choose import Choice
    from rmuscle_core.tuning.sweep import Sweep

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
    from rmuscle_core.tuning.choose import choose
    from rmuscle_core.tuning.sweep import Grid, sweep

    peaks = KNOWN[DEVICES[args.predict]] if args.predict else None
    with source_of(args.episodes, args, load_config(args.checkpoint)) as source:
        pending = at_least_two(list(source))
        with Session(args.checkpoint, Settings(), pending, source.execute_steps, args.out, device=args.device,
                     cameras=source.cameras) as session, progress_bar() as bar:
            task = bar.add_task('calls', total=None)
            episodes, skipped = session.prepare()
            for name, reason in skipped:
                print(f'{name} was skipped: {reason}')
            found = sweep(session.cached, episodes[::2], Grid(), session.executed, peaks,
                          lambda done, total: bar.update(task, completed=done, total=total))
            choice = choose(found, args.budget)
            chosen = Grid((choice.token_ratio,), (choice.neuron_ratio,), (choice.window,))
            checked = float(sweep(session.cached, episodes[1::2], chosen, session.executed, peaks).errors.mean()
                            ) if episodes[1::2] else None
    write(args, found, choice, checked)
    return EXCEEDED if checked is not None and checked > args.budget else 0


def at_least_two(pending: list[PendingEpisode]) -> list[PendingEpisode]:
    """Raise EpisodeError when there is no episode to try settings on beside a reference."""
    if len(pending) < 2:
        raise EpisodeError(f'found {len(pending)} episodes, expected two at least: one becomes the reference, settings '
                           'are tried on the other, and with five the choice is checked too; record more')
    return pending


def cautions(found: Sweep, choice: Choice, checked: float | None) -> list[str]:
    """What the choice cannot be trusted for."""
    said = []
    if checked is None:
        said.append('nothing was held out: the only episode beside the references chose the setting, so its error on '
                    'others is unknown; record five episodes or more')
    elif len(set(found.episodes.tolist())) == 1:
        said.append('one episode alone chose the setting, so the bound is a guess; record five episodes or more')
    if choice.milliseconds >= found.dense_ms:
        said.append('no setting within the budget is faster than dense; allow more, or set mode to dense')
    return said


def write(args: argparse.Namespace, found: Sweep, choice: Choice, checked: float | None) -> None:
    """tuned.yaml, tune.json, tune.png, and the result in a few lines."""
    from rmuscle_core.tuning.choose import bounds
    from rmuscle_core.tuning.picture import draw

    label = f'predicted for {DEVICES[args.predict]}' if args.predict else 'measured here'
    error, speedup, notes = bounds(found)[0], found.dense_ms / choice.milliseconds, cautions(found, choice, checked)
    args.out.mkdir(parents=True, exist_ok=True)
    draw(args.out / 'tune.png', found, error, choice, checked, args.budget, label)
    held_out = 'nothing' if checked is None else f'{checked:.4f}'
    write_yaml(args.out / 'tuned.yaml', choice, args.budget, held_out)
    summary = {**asdict(choice), 'held_out_error': checked, 'budget': args.budget, 'cost': label, 'speedup': speedup,
               'dense_ms': found.dense_ms, 'calls': len(found.episodes),
               'episodes': len(set(found.episodes.tolist())), 'cautions': notes, 'grid': asdict(found.grid),
               'errors': error.round(5).tolist(), 'milliseconds': found.milliseconds.round(3).tolist(),
               'similarity': found.similarity.round(4).tolist()}
    (args.out / 'tune.json').write_text(json.dumps(summary, indent=1) + '\n')
    print(f'token_ratio {choice.token_ratio:g}, neuron_ratio {choice.neuron_ratio:g}, window {choice.window}: error '
          f'{choice.error:.4f} (bound {choice.bound:.4f}, held out {held_out}, budget {args.budget:g}), speedup '
          f'{speedup:.2f} {label}; see {args.out}')
    print(*(f'caution: {note}' for note in notes), sep='\n', end='\n' if notes else '')


def write_yaml(path: Path, choice: Choice, budget: float, held_out: str) -> None:
    """A parameter file for ``ros2 launch``, or ``ros2 param load``."""
    path.write_text(f'# Chosen by "rmuscle tune" for an action error below {budget:g} half ranges; held out: '
                    f'{held_out}.\n/**:\n  ros__parameters:\n    profile: custom\n'
                    f'    token_ratio: {choice.token_ratio}\n    neuron_ratio: {choice.neuron_ratio}\n'
                    f'    window: {choice.window}\n')
