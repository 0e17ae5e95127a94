# SPDX-License-Identifier: Apache-2.0
"""Record a small library over ROS topics, run the same episodes dense and cached, print and draw the difference."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import rclpy
import yaml
from rich.console import Console
from rich.table import Table

from rmuscle_core.errors import RMuscleError
from rmuscle_core.settings import Settings
from rmuscle_ros.demo.compare import compare, summarise
from rmuscle_ros.demo.picture import draw
from rmuscle_ros.demo.session import Run, Session

ROOT = Path(__file__).resolve().parents[2]
LIBRARY_SEED, TEST_SEED = 50_000, 1_000  # disjoint, and apart from the seeds of training
ATTEMPTS = 3  # recordings tried per episode wanted; the policy may fail


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Options of the demo."""
    parser = argparse.ArgumentParser(prog='scripts/demo', description=__doc__)
    parser.add_argument('--checkpoint', type=Path, default=ROOT / 'config' / 'policy' / 'transfer_cube')
    parser.add_argument('--out', type=Path, default=ROOT / 'out' / 'demo')
    parser.add_argument('--episodes', type=int, default=5, help='episodes per mode (default: 5)')
    parser.add_argument('--library-episodes', type=int, default=8, help='successful episodes to record (default: 8)')
    parser.add_argument('--profile', default='default', choices=('fast', 'default', 'slow'))
    parser.add_argument('--seed', type=int, default=TEST_SEED, help='seed of the first episode')
    return parser.parse_args(arguments)


def record_library(session: Session, wanted: int) -> None:
    """Run dense episodes as fast as the simulator goes; the node writes the successful ones to its library."""
    session.set('policy_node', mode='dense')
    session.set('cell_node', real_time_factor=0.0)
    recorded = 0
    for seed in range(LIBRARY_SEED, LIBRARY_SEED + ATTEMPTS * wanted):
        if recorded == wanted:
            return
        run = session.run_episode(seed)
        say(f'library: seed {seed} {"succeeded, saved" if run.success else "failed, not saved"}')
        if run.success:
            session.save_episode()
            recorded += 1
    if recorded < wanted:
        raise RMuscleError(f'only {recorded} of {ATTEMPTS * wanted} episodes succeeded, {wanted} were wanted; '
                           'see out/demo/policy_node.log')


def run_pairs(session: Session, seeds: range) -> tuple[list[Run], list[Run]]:
    """Run each seed at real-time speed, dense and then cached, so that the machine's drift hits both."""
    session.set('cell_node', real_time_factor=1.0)
    runs: dict[str, list[Run]] = {'dense': [], 'full': []}
    for seed in seeds:
        for mode, done in runs.items():
            session.set('policy_node', mode=mode)
            run = session.run_episode(seed)
            done.append(run)
            say(f'{mode}: seed {seed} {"succeeded" if run.success else "failed"} after {len(run.calls)} calls')
    return runs['dense'], runs['full']


def print_table(summary: dict) -> None:
    """One row per mode, then what they share."""
    table = Table(title='rMuscle demo: bimanual transfer cube')
    for heading in ('', 'success', 'calls', 'library / previous / dense', 'ms per call', 'policy latency ms'):
        table.add_column(heading, justify='left' if not heading else 'right')
    for mode in ('dense', 'cached'):
        row = summary[mode]
        table.add_row(mode, f'{row["successes"]} of {row["episodes"]}', str(row['calls']),
                      ' / '.join(str(n) for n in row['served'].values()), f'{summary[f"{mode}_ms_per_call"]:.1f}',
                      f'{row["policy_latency_ms"]:.1f}')
    Console().print(table)
    print(f'dense / cached: {summary["ratio_dense_to_cached"]:.2f}x on this CPU at token_ratio '
          f'{summary["token_ratio"]:g} and neuron_ratio {summary["neuron_ratio"]:g}\n'
          f'after the first two calls of an episode {summary["library_share_after_first_two"]:.0%} came from the '
          'library\n'
          'mean action difference to dense on the same observations: '
          f'{summary["mean_action_difference"]:.4f} rad (grippers 0 to 1; largest '
          f'{summary["max_action_difference"]:.3f})\n'
          f'library: {summary["library_entries"]} entries, {summary["library_megabytes"]:.1f} MB; working set '
          f'{summary["working_set_megabytes"]:.1f} MB')


def run_demo(args: argparse.Namespace) -> None:
    """Leave summary.json, demo.png and the nodes' logs in the output folder."""
    args.out.mkdir(parents=True, exist_ok=True)
    library = args.out / 'library'
    shutil.rmtree(library, ignore_errors=True)
    cell_file = ROOT / 'config' / 'workcell.yaml'
    cell = yaml.safe_load(cell_file.read_text())['/**']['ros__parameters']
    settings = Settings().with_values(profile=args.profile)
    seeds = range(args.seed, args.seed + args.episodes)
    node = rclpy.create_node('demo')
    with Session(node, cell['prompt'], cell['joint_names'], cell['cameras'], args.out) as session:
        say('starting cell_node and policy_node')
        session.start('cell_node')
        session.start('policy_node', '--params-file', str(cell_file), '-p', f'checkpoint:={args.checkpoint}',
                      '-p', f'library:={library}', '-p', f'profile:={args.profile}')
        session.activate()
        record_library(session, args.library_episodes)
        dense, cached = run_pairs(session, seeds)
    node.destroy_node()
    say('comparing every cached call with a dense one on the same observation')
    difference, picture = compare(args.checkpoint, library, cell['prompt'], cached, settings)
    summary = summarise(dense, cached, difference)
    (args.out / 'summary.json').write_text(json.dumps(summary, indent=2) + '\n')
    draw(args.out / 'demo.png', picture, dense[0], cached[0], cell['joint_names'], summary)
    print_table(summary)
    say(f'wrote {args.out / "summary.json"} and {args.out / "demo.png"}')


def say(text: str) -> None:
    """Progress on stderr."""
    print(f'[demo] {text}', file=sys.stderr, flush=True)


def main() -> int:
    """Exit code 0, or 3 with one sentence."""
    args = parse()
    rclpy.init()
    try:
        run_demo(args)
    except RMuscleError as error:
        print(f'demo: {error}', file=sys.stderr)
        return 3
    finally:
        rclpy.try_shutdown()
    return 0


if __name__ == '__main__':
    raise SystemExit(main())
