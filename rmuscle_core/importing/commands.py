# SPDX-License-Identifier: Apache-2.0
"""``rmuscle library build``."""

from __future__ import annotations

import argparse
from pathlib import Path

from rmuscle_core.importing.build import BuildReport, build_library
from rmuscle_core.importing.options import EPISODES, add_source_options, source_of
from rmuscle_core.options import add_device, output_folder
from rmuscle_core.settings import WEIGHT_DTYPES, Settings

FINE, SKIPPED = 0, 1


def add_build(commands: argparse._SubParsersAction) -> None:
    """Add ``build`` to the commands of ``rmuscle library``."""
    parser = commands.add_parser(
        'build', help='turn recorded episodes into a library, or add them to one',
        description='Runs the policy on every recorded observation and keeps what a later call can reuse. What the '
                    'library has already is passed over, so an interrupted build can be repeated. Exit code 1 when '
                    'episodes were skipped; each is listed with the reason.')
    parser.add_argument('--checkpoint', type=Path, required=True, help='LeRobot or openpi checkpoint directory')
    parser.add_argument('--episodes', type=Path, required=True, help=EPISODES)
    parser.add_argument('--out', type=output_folder, required=True, help='folder of the library; made if it is not '
                        'there')
    add_device(parser)
    parser.add_argument('--weight-dtype', choices=WEIGHT_DTYPES, default='checkpoint',
                        help='as the policies that will use the library have it (default: checkpoint)')
    add_source_options(parser)
    parser.set_defaults(run=run_build)


def run_build(args: argparse.Namespace) -> int:
    """Add every episode that the library does not have yet, and say what was skipped and why."""
    from rmuscle_core.bench.report import progress_bar
    from rmuscle_core.library import folder, manifest
    from rmuscle_core.model import load_config
    from rmuscle_core.policy import MusclePolicy

    with source_of(args.episodes, args, load_config(args.checkpoint)) as source:
        episodes = list(source)
        new = not manifest.present(args.out)
        policy = MusclePolicy.load(args.checkpoint, Settings(weight_dtype=args.weight_dtype), args.out, args.device,
                                   need_library=True, cameras=source.cameras or None)
        try:
            with progress_bar() as bar:
                task = bar.add_task('episodes', total=len(episodes))
                report = build_library(policy, episodes, lambda episode: bar.advance(task))
        finally:
            policy.close()
            if new and not policy.library.episodes:
                folder.remove_empty(args.out)
    print_report(report, args.out)
    return SKIPPED if report.skipped else FINE


def print_report(report: BuildReport, library: Path) -> None:
    """One line of counts, then one for each episode that was skipped."""
    where = f' to {library}' if library.exists() else f': {library} was not made'
    print(f'{report.added} episodes added{where}' + (f', {report.present} were there' if report.present else '')
          + (f', {len(report.skipped)} skipped:' if report.skipped else ''))
    print(*(f'  {name}: {reason}' for name, reason in report.skipped), sep='\n', end='\n' if report.skipped else '')
