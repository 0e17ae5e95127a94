# SPDX-License-Identifier: Apache-2.0
"""``rmuscle workcell demos | train | evaluate``."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the ``workcell`` command; the simulator and torch are imported only by the command that runs."""
    parser = subparsers.add_parser('workcell', help='the simulated two-arm workstation')
    commands = parser.add_subparsers(dest='workcell_command', required=True)
    demos = commands.add_parser('demos', help='record successful demonstrations of the scripted expert')
    demos.add_argument('--episodes', type=int, default=500, help='successful episodes to record')
    demos.add_argument('--located', type=int, default=6000, help='still frames for the localisation task')
    demos.add_argument('--every', type=int, default=3, help='control steps between two stored frames')
    demos.add_argument('--seed', type=int, default=100_000, help='seed of the first episode; keep test seeds below it')
    demos.add_argument('--out', type=Path, required=True, help='demonstration file (.npz) to write')
    demos.set_defaults(run=run_demos)


def run_demos(args: argparse.Namespace) -> int:
    """Record and write a demonstration file."""
    from rmuscle_core.workcell import dataset
    from rmuscle_core.workcell.cell import WorkCell
    from rmuscle_core.workcell.demonstrations import record

    start, cell = time.monotonic(), WorkCell()

    def progress(done: int, tried: int) -> None:
        if done % 50 == 0 or done == args.episodes:
            print(f'{done} successful of {tried} episodes, {time.monotonic() - start:.0f} s', flush=True)

    demonstrations = record(cell, args.episodes, args.located, args.seed, args.every, progress)
    cell.close()
    size = dataset.write(args.out, demonstrations)
    print(f'{args.out}: {len(demonstrations.images)} frames, {len(demonstrations.located_images)} still frames, '
          f'{size / 1e6:.1f} MB', file=sys.stdout)
    return 0
