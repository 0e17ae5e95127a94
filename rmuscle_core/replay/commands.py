# SPDX-License-Identifier: Apache-2.0
"""``rmuscle replay``: what would the caches have changed in these executions?"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rmuscle_core.importing.options import EPISODES, add_source_options, source_of
from rmuscle_core.options import (
    add_device,
    add_settings,
    check_library,
    given_settings,
    new_folder,
    number,
    output_folder,
    whole,
)
from rmuscle_core.settings import Settings

EXCEEDED = 1


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add ``replay``."""
    parser = subparsers.add_parser(
        'replay', help='recorded executions, dense and cached side by side',
        description='Writes report.html (one file, no network) and report.json. Without a library the first episodes '
                    'become the references and the others are replayed. Exit code 1 when a limit is exceeded.')
    parser.add_argument('episodes', type=Path, help=EPISODES)
    parser.add_argument('--checkpoint', type=Path, required=True, help='LeRobot or openpi checkpoint directory')
    parser.add_argument('--library', type=Path, help='episode library made with it (default: one made of the first '
                        'episodes)')
    parser.add_argument('--references', type=whole(0), metavar='N', help='episodes that become references (default: '
                        'half, none with a library)')
    parser.add_argument('--out', type=output_folder, default=Path('out/replay'), help='folder of the report (default: '
                        '%(default)s)')
    parser.add_argument('--out-bag', type=new_folder, metavar='DIR', help='also write the predicted chunks as a bag '
                        '(mcap) to this folder, which must not be there yet')
    add_device(parser)
    limits = parser.add_argument_group('limits', 'none is set unless given')
    limits.add_argument('--max-action-difference', type=number(), metavar='X', help='95th percentile of calls, in half '
                        'ranges')
    limits.add_argument('--max-boundary-ratio', type=number(), metavar='X', help='jump between chunks, cached over '
                        'dense')
    limits.add_argument('--min-hit-ratio', type=number(0, 1), metavar='X', help='share of calls served by a '
                        'reference, 0 to 1')
    limits.add_argument('--min-speedup', type=number(), metavar='X', help='median speedup of a call on this machine')
    add_source_options(parser)
    add_settings(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Replay, write the report, say in one line what it found."""
    from rmuscle_core.bench.report import progress_bar
    from rmuscle_core.model import load_config
    from rmuscle_core.replay import measures, report
    from rmuscle_core.replay.session import Session

    check_library(args.library)
    limits = measures.Limits(args.max_action_difference, args.max_boundary_ratio, args.min_hit_ratio, args.min_speedup)
    with (source_of(args.episodes, args, load_config(args.checkpoint)) as source,
          Session(args.checkpoint, settings_of(args), list(source), source.execute_steps, args.out, args.library,
                  args.references, args.device, source.cameras) as session, progress_bar() as bar):
        task = bar.add_task('episodes', total=len(session.references) + len(session.tested))
        replayed = session.run(lambda: bar.advance(task))
        for name, reason in replayed.skipped:
            print(f'{name} was skipped: {reason}')
        joints = joint_names(source.joints, session.dense.config.action_dim)
        found = measures.summarise(replayed.calls, joints, session.executed, replayed.scale, limits)
        found |= {'title': f'rMuscle replay of {args.episodes.name}', 'skipped': replayed.skipped,
                  'min_similarity': session.cached.settings.min_similarity,
                  'command': ' '.join(['rmuscle', *sys.argv[1:]]), 'made_with': made_with(args, session.cached)}
        report.write(args.out, found, replayed.calls, replayed.scale, session.pictures)
    if args.out_bag:
        write_bag(args, replayed, joints, session.executed)
    print(f'{found["calls"]} calls, {found["hit_ratio"]:.0%} served by references, action difference '
          f'{found["action_difference"]["mean"]:.4f} of the half range, speedup {found["speedup"]:.2f}; see '
          f'{args.out / "report.html"}')
    broken = [row for row in found['limits'] if not row['holds']]
    for row in broken:
        print(f'exceeded: {row["name"]} is {row["found"]:.4g}, the limit {row["limit"]:g}')
    return EXCEEDED if broken else 0


def settings_of(args: argparse.Namespace) -> Settings:
    """Those of the node's parameter file, where one is given, then those of the command line."""
    from rmuscle_core.importing.robot import read_settings

    from_file = read_settings(args.parameters) if args.parameters else {}
    return Settings().with_values(**{**from_file, **given_settings(args)})


def joint_names(names: tuple[str, ...], actions: int) -> tuple[str, ...]:
    """The source's, which are those of the state, where every action has one; else numbers."""
    return names if len(names) == actions else tuple(f'action {number}' for number in range(actions))


def made_with(args: argparse.Namespace, policy) -> dict[str, object]:
    """Software, device, checkpoint and settings of the run."""
    from rmuscle_core.bench.device import describe
    from rmuscle_core.device import open_device

    changed = {name: value for name, value in vars(policy.settings).items() if value != getattr(Settings(), name)}
    return {**describe(open_device(args.device)), 'checkpoint': str(args.checkpoint), 'recording': str(args.episodes),
            'weights': policy.library.fingerprint.get('weights', ''), 'settings changed': changed or 'none'}


def write_bag(args: argparse.Namespace, replayed, joints: tuple[str, ...], executed: int) -> None:
    """The predicted chunks, at the rate the commands had."""
    from rmuscle_core.importing.robot import Robot, read_robot
    from rmuscle_core.replay.bag_out import write_chunks
    from rmuscle_core.replay.measures import per_call_difference

    robot_rate = read_robot(args.parameters).control_rate_hz if args.parameters else Robot.control_rate_hz
    write_chunks(args.out_bag, replayed.calls, joints, args.control_rate_hz or robot_rate,
                 per_call_difference(replayed.calls, executed, replayed.scale))
