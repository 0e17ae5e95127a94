# SPDX-License-Identifier: Apache-2.0
"""``rmuscle library build``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.progress import Progress

from rmuscle_core.errors import SettingsError
from rmuscle_core.importing.build import BuildReport, build_library
from rmuscle_core.importing.episodes import Wanted
from rmuscle_core.importing.sources import SourceOptions, open_source
from rmuscle_core.options import pairs
from rmuscle_core.settings import WEIGHT_DTYPES, Settings

FINE, SKIPPED = 0, 1


def add_build(commands: argparse._SubParsersAction) -> None:
    """Add ``build`` to the commands of ``rmuscle library``."""
    parser = commands.add_parser(
        'build', help='turn recorded episodes into a library, or add them to one',
        description='What the library has already is passed over, so an interrupted build can be repeated. Exit code 1 '
                    'when episodes were skipped; each is listed with the reason.')
    parser.add_argument('--checkpoint', type=Path, required=True, help='LeRobot checkpoint directory')
    parser.add_argument('--episodes', type=Path, required=True, help='recording (.h5), folder of a LeRobotDataset v3, '
                        'ROS 2 bag (mcap or sqlite3), or folder of bags')
    parser.add_argument('--out', type=Path, required=True, help='library directory')
    parser.add_argument('--device', default='cpu', help='where the policy runs (default: cpu)')
    parser.add_argument('--weight-dtype', choices=WEIGHT_DTYPES, default='checkpoint',
                        help='as the policies that will use the library have it (default: checkpoint)')
    group = parser.add_argument_group('datasets and bags')
    group.add_argument('--camera', action='append', default=[], metavar='CAMERA=NAME',
                       help='camera of the checkpoint and its name in the dataset, where they differ; may be repeated')
    group.add_argument('--masked-camera', action='append', default=[], metavar='CAMERA',
                       help='camera of the checkpoint that the robot does not have; may be repeated')
    group.add_argument('--prompt', default='', help='instruction, instead of the recorded one')
    group.add_argument('--execute-steps', type=int, default=0, help="actions between two policy calls (default: the "
                       "parameter file's, else the checkpoint's)")
    group.add_argument('--control-rate-hz', type=float, help="actions per second (default: the dataset's frames per "
                       "second, the parameter file's)")
    group.add_argument('--tolerance-s', type=float, default=1e-4, help="how far a dataset's stamps may be from its "
                       'frame rate (default: 1e-4, as LeRobot)')
    group.add_argument('--parameters', type=Path, metavar='YAML', help='parameter file of the policy node (bags)')
    group.add_argument('--topic', action='append', default=[], metavar='NAME=TOPIC',
                       help='full name of joint_states, prompt or an image topic in a bag; may be repeated')
    group.add_argument('--episodes-topic', default='', metavar='TOPIC', help='each message on it begins an episode; '
                       'without it a bag is one')
    parser.set_defaults(run=run_build)


def run_build(args: argparse.Namespace) -> int:
    """Add every episode that the library does not have yet, and say what was skipped and why."""
    from rmuscle_core.model import load_config
    from rmuscle_core.policy import MusclePolicy

    config = load_config(args.checkpoint)
    if not 0 <= args.execute_steps <= config.chunk_size:
        raise SettingsError(f'--execute-steps is {args.execute_steps}, expected 1 to {config.chunk_size}, the steps of '
                            'a chunk')
    if args.control_rate_hz is not None and not args.control_rate_hz > 0:
        raise SettingsError(f'--control-rate-hz is {args.control_rate_hz}, expected actions per second above 0')
    wanted = Wanted(config.cameras, config.state_dim, config.execute_steps, pairs('--camera', args.camera),
                    args.masked_camera, args.control_rate_hz, args.prompt)
    options = SourceOptions(args.execute_steps, args.tolerance_s, args.parameters, pairs('--topic', args.topic),
                            args.episodes_topic)
    with open_source(args.episodes, wanted, options) as source:
        policy = MusclePolicy.load(args.checkpoint, Settings(weight_dtype=args.weight_dtype), args.out, args.device,
                                   need_library=True, cameras=source.cameras or None)
        try:
            with Progress(disable=not sys.stdout.isatty()) as progress:
                bar = progress.add_task('episodes', total=len(source))
                report = build_library(policy, source, lambda episode: progress.advance(bar))
        finally:
            policy.close()
    print_report(report, args.out)
    return SKIPPED if report.skipped else FINE


def print_report(report: BuildReport, library: Path) -> None:
    """One line of counts, then one for each episode that was skipped."""
    print(f'{report.added} episodes added to {library}' + (f', {report.present} were there' if report.present else '')
          + (f', {len(report.skipped)} skipped:' if report.skipped else ''))
    print(*(f'  {name}: {reason}' for name, reason in report.skipped), sep='\n', end='\n' if report.skipped else '')
