# SPDX-License-Identifier: Apache-2.0
"""``rmuscle workcell demos | train | evaluate | bag``."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rmuscle_core.options import (
    add_device,
    add_settings,
    check_library,
    given_settings,
    new_folder,
    output_file,
    whole,
)
from rmuscle_core.settings import Settings
from rmuscle_core.workcell import train
from rmuscle_core.workcell.tasks import TASKS

PIXELS = 64  # edge of a recorded view

if TYPE_CHECKING:
    from rmuscle_core.workcell.evaluate import Episode


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the ``workcell`` command; the simulator is imported only by the commands that run it."""
    parser = subparsers.add_parser('workcell', help='the simulated workstations')
    commands = parser.add_subparsers(required=True, metavar='command')
    demos = commands.add_parser('demos', help='record successful demonstrations of the scripted expert')
    demos.add_argument('--episodes', type=whole(1), default=500, metavar='N', help='successful episodes to record '
                       '(default: %(default)s)')
    demos.add_argument('--located', type=whole(1), default=6000, metavar='N', help='still frames for the localisation '
                       'task (default: %(default)s)')
    demos.add_argument('--every', type=whole(1, 1000), default=3, metavar='N', help='control steps between two stored '
                       'frames (default: %(default)s)')
    demos.add_argument('--seed', type=whole(0), default=100_000, help='seed of the first episode; keep test seeds '
                       'below it (default: %(default)s)')
    demos.add_argument('--out', type=output_file, required=True, help='demonstration file (.npz) to write')
    add_task(demos)
    demos.set_defaults(run=run_demos)
    training = commands.add_parser('train', help='train a small pi0.5 policy on demonstrations')
    train.add_arguments(training)
    training.set_defaults(run=train.run_train)
    evaluation = commands.add_parser(
        'evaluate', help='success of a policy in closed loop',
        description='Runs a policy in the simulated cell, one episode for each seed. "rmuscle eval" compares settings.')
    evaluation.add_argument('--checkpoint', type=Path, required=True, help='LeRobot or openpi checkpoint directory')
    evaluation.add_argument('--library', type=Path, help='episode library made with this checkpoint (default: none, '
                            'and mode is dense unless --mode says otherwise)')
    evaluation.add_argument('--episodes', type=whole(1), default=50, metavar='N', help='episodes to run, each from a '
                            'seed of its own (default: %(default)s)')
    evaluation.add_argument('--seed', type=whole(0), default=1000, help='seed of the first episode (default: '
                            '%(default)s)')
    evaluation.add_argument('--execute', type=whole(1), metavar='N', help='commands executed of each chunk (default: '
                            'as trained)')
    evaluation.add_argument('--frozen', action='store_true', help='control: show the first images all the time')
    evaluation.add_argument('--record', type=output_file, metavar='FILE', help='write the successful episodes to this '
                            '.h5, for "rmuscle library build"')
    add_device(evaluation)
    evaluation.add_argument('--json', action='store_true', help='print one JSON object')
    add_task(evaluation)
    add_settings(evaluation)
    evaluation.set_defaults(run=run_evaluate)
    bag = commands.add_parser('bag', help='record executions of a policy as a ROS 2 bag (mcap)')
    bag.add_argument('--checkpoint', type=Path, required=True, help='LeRobot or openpi checkpoint directory')
    bag.add_argument('--episodes', type=whole(1), default=6, metavar='N', help='episodes to record (default: '
                     '%(default)s)')
    bag.add_argument('--seed', type=whole(0), default=6000, help='seed of the first episode (default: %(default)s)')
    bag.add_argument('--out', type=new_folder, required=True, help='bag folder to make; must not be there yet')
    add_task(bag)
    bag.set_defaults(run=run_bag)


def add_task(parser: argparse.ArgumentParser) -> None:
    """Option naming the workstation."""
    parser.add_argument('--task', choices=TASKS, default='transfer_cube', help='workstation (default: transfer_cube)')


def run_demos(args: argparse.Namespace) -> int:
    """Record and write a demonstration file."""
    from rmuscle_core.workcell import dataset
    from rmuscle_core.workcell.demonstrations import record

    task = TASKS[args.task]
    start, cell = time.monotonic(), task.make_cell(PIXELS)

    def progress(done: int, tried: int) -> None:
        if done % 50 == 0 or done == args.episodes:
            print(f'{done} successful of {tried} episodes, {time.monotonic() - start:.0f} s', flush=True)

    demonstrations = record(task.make_teacher(cell), args.episodes, args.located, args.seed, args.every, progress)
    cell.close()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    size = dataset.write(args.out, demonstrations)
    print(f'{args.out}: {len(demonstrations.images)} frames, {len(demonstrations.located_images)} still frames, '
          f'{size / 1e6:.1f} MB')
    return 0


def run_evaluate(args: argparse.Namespace) -> int:
    """Run episodes and print how many succeeded."""
    from rmuscle_core.policy import MusclePolicy
    from rmuscle_core.workcell.evaluate import run_episodes, summary

    check_library(args.library)
    settings = Settings().with_values(**{'mode': 'full' if args.library else 'dense', **given_settings(args)})
    policy = MusclePolicy.load(args.checkpoint, settings, args.library, args.device, need_library=bool(args.library))
    execute = args.execute or policy.config.execute_steps

    def progress(episode: Episode) -> None:
        if not args.json:
            print(f'seed {episode.seed}: {"success" if episode.success else "failure"} after {episode.steps} steps, '
                  f'{len(episode.reports)} calls', flush=True)

    cell = TASKS[args.task].make_cell(policy.config.vision.image_size)
    seeds = range(args.seed, args.seed + args.episodes)
    episodes = run_episodes(cell, policy, seeds, execute, args.frozen, progress)
    policy.close()
    cell.close()
    if args.record:
        record(args.record, episodes, cell.joints)
    result = summary(episodes)
    low, high = result['interval']
    print(json.dumps(result) if args.json else
          f'{result["successes"]} of {result["episodes"]} succeeded (95 % interval {low:.2f} to {high:.2f}), '
          f'{result["calls_per_episode"]:.1f} calls an episode, {result["milliseconds"]:.0f} ms a call, '
          f'served by {result["paths"]}')
    return 0


def record(path: Path, episodes: list[Episode], joints: tuple[str, ...]) -> None:
    """Write what the policy saw in its successful episodes."""
    from rmuscle_core.library.recording import RecordedEpisode, write_recording

    write_recording(path, [RecordedEpisode(f'seed-{episode.seed}', True, episode.observations)
                           for episode in episodes if episode.success], joints)


def run_bag(args: argparse.Namespace) -> int:
    """Write dense executions as a robot would have recorded them."""
    from rmuscle_core.policy import MusclePolicy
    from rmuscle_core.workcell.bag import write_bag
    from rmuscle_core.workcell.evaluate import check_fits

    policy = MusclePolicy.load(args.checkpoint, Settings(mode='dense'))
    cell = TASKS[args.task].make_cell(policy.config.vision.image_size)
    check_fits(policy, cell)
    write_bag(args.out, cell, policy, range(args.seed, args.seed + args.episodes))
    policy.close()
    cell.close()
    size = sum(file.stat().st_size for file in args.out.iterdir())
    print(f'{args.out}: {args.episodes} episodes, {size / 1e6:.1f} MB')
    return 0
