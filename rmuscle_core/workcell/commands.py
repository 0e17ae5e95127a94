# SPDX-License-Identifier: Apache-2.0
"""``rmuscle workcell demos | train | evaluate | bag``."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rmuscle_core.settings import Settings, rows
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
    demos.add_argument('--episodes', type=int, default=500, help='successful episodes to record')
    demos.add_argument('--located', type=int, default=6000, help='still frames for the localisation task')
    demos.add_argument('--every', type=int, default=3, help='control steps between two stored frames')
    demos.add_argument('--seed', type=int, default=100_000, help='seed of the first episode; keep test seeds below it')
    demos.add_argument('--out', type=Path, required=True, help='demonstration file (.npz) to write')
    add_task(demos)
    demos.set_defaults(run=run_demos)
    training = commands.add_parser('train', help='train a small pi0.5 policy on demonstrations')
    train.add_arguments(training)
    training.set_defaults(run=train.run_train)
    evaluation = commands.add_parser('evaluate', help='success of a policy in closed loop')
    evaluation.add_argument('--checkpoint', type=Path, required=True)
    evaluation.add_argument('--library', type=Path, help='episode library made with this checkpoint')
    evaluation.add_argument('--episodes', type=int, default=50)
    evaluation.add_argument('--seed', type=int, default=1000, help='seed of the first episode')
    evaluation.add_argument('--execute', type=int, help='commands executed of each chunk (default: as trained)')
    evaluation.add_argument('--frozen', action='store_true', help='control: show the first images all the time')
    evaluation.add_argument('--record', type=Path, help='write the successful episodes for "rmuscle library build"')
    evaluation.add_argument('--device', default='cpu')
    evaluation.add_argument('--json', action='store_true', help='print one JSON object')
    add_task(evaluation)
    add_settings(evaluation)
    evaluation.set_defaults(run=run_evaluate)
    bag = commands.add_parser('bag', help='record executions of a policy as a ROS 2 bag (mcap)')
    bag.add_argument('--checkpoint', type=Path, required=True)
    bag.add_argument('--episodes', type=int, default=6)
    bag.add_argument('--seed', type=int, default=6000, help='seed of the first episode (%(default)s)')
    bag.add_argument('--out', type=Path, required=True, help='bag folder to make')
    add_task(bag)
    bag.set_defaults(run=run_bag)


def add_task(parser: argparse.ArgumentParser) -> None:
    """Option naming the workstation."""
    parser.add_argument('--task', choices=TASKS, default='transfer_cube', help='workstation (default: transfer_cube)')


def add_settings(parser: argparse.ArgumentParser) -> None:
    """One option for every setting; what is not given keeps its default, ``mode`` is dense without a library."""
    group = parser.add_argument_group('settings', 'as in docs/parameters.md')
    for row in rows():
        group.add_argument(f'--{row.name.replace("_", "-")}', type=type(row.default), help=row.metadata['description'],
                           metavar='|'.join(row.metadata['choices']) or type(row.default).__name__)


def chosen_settings(args: argparse.Namespace) -> Settings:
    """Checked settings of the options; SettingsError names what does not fit."""
    given = {row.name: getattr(args, row.name) for row in rows() if getattr(args, row.name) is not None}
    return Settings().with_values(**{'mode': 'full' if args.library else 'dense', **given})


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
    size = dataset.write(args.out, demonstrations)
    print(f'{args.out}: {len(demonstrations.images)} frames, {len(demonstrations.located_images)} still frames, '
          f'{size / 1e6:.1f} MB')
    return 0


def run_evaluate(args: argparse.Namespace) -> int:
    """Run episodes and print how many succeeded."""
    from rmuscle_core.policy import MusclePolicy
    from rmuscle_core.workcell.evaluate import run_episodes, summary

    policy = MusclePolicy.load(args.checkpoint, chosen_settings(args), args.library, args.device)
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

    policy = MusclePolicy.load(args.checkpoint, Settings(mode='dense'))
    cell = TASKS[args.task].make_cell(policy.config.vision.image_size)
    write_bag(args.out, cell, policy, range(args.seed, args.seed + args.episodes))
    policy.close()
    cell.close()
    size = sum(file.stat().st_size for file in args.out.iterdir())
    print(f'{args.out}: {args.episodes} episodes, {size / 1e6:.1f} MB')
    return 0
