# SPDX-License-Identifier: Apache-2.0
"""A robot, a clock and the policy node as a process, for a long time, with something going wrong every few seconds.

    python bench/soak --minutes 30 --seed 1 --json soak.json

Checked on the wire, by code that the node does not share: every trajectory is one that a controller accepts, finite,
within the limits, not past, and joins what the robot does; the node commands again after every fault and never ends by
itself; no saved episode is lost; memory, threads and open files do not grow; no failure that nobody foresaw is in its
log. Exit code 1 if any of it did not hold. Needs ROS; the folder of the run is kept when it failed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

os.environ.setdefault('ROS_AUTOMATIC_DISCOVERY_RANGE', 'LOCALHOST')
os.environ['ROS_DOMAIN_ID'] = str(random.randint(1, 100))  # nobody else's robot

import rclpy
import storage  # noqa: F401 - adds its faults to the lists
import yaml
from faults import ENDING, FAULTS
from process import BOUNDS, ROOT, NodeProcess
from rclpy.signals import SignalHandlerOptions
from robot import JOINTS, LIMIT, STEP
from std_srvs.srv import SetBool, Trigger
from world import CAMERAS, RATE_HZ, Violated, World

RECOVERY_S = 45.0  # wall time within which a trajectory must come after a fault, on a machine with other work
ROUNDS_PER_LIFE = 3  # of all other faults between two that end the process, so that growth can show


def parameters(folder: Path, checkpoint: Path, library: Path) -> Path:
    """The node's parameter file."""
    path = folder / 'parameters.yaml'
    path.write_text(yaml.safe_dump({'/**': {'ros__parameters': {
        'use_sim_time': True, 'checkpoint': str(checkpoint), 'library': str(library), 'prompt': 'transfer cube',
        'device': 'cpu', 'joint_names': list(JOINTS), 'cameras': list(CAMERAS), 'control_rate_hz': RATE_HZ,
        'joint_lower': [-LIMIT], 'joint_upper': [LIMIT], 'max_step': [STEP]}}}))
    return path


def schedule(rng: random.Random, chosen: list[str] | None) -> Any:
    """Names of faults, for ever: every round holds each once; those that end the process come every few rounds."""
    while True:
        for number in range(ROUNDS_PER_LIFE):
            names = [n for n in FAULTS if not chosen or n in chosen]
            if number == ROUNDS_PER_LIFE - 1 or chosen:
                names += [n for n in ENDING if not chosen or n in chosen]
            yield from rng.sample(names, len(names))


def record_library(world: World) -> None:
    """The executions that the node may look back on: what it does undisturbed, saved."""
    for _ in range(2):
        world.advance(6.0)
        answer = world.call(SetBool, 'save_episode', SetBool.Request(data=True))
        if not answer.success:
            raise Violated(f'the first episodes could not be saved: {answer.message}')
        world.saved.add(Path(answer.message))
        world.call(Trigger, 'reset_episode', Trigger.Request())


def inject(world: World, name: str) -> float | None:
    """One fault; wall seconds until the robot was commanded again, None if that did not come."""
    world.fault = name
    try:
        {**FAULTS, **ENDING}[name](world, world.rng)
        accepted, since = world.robot.accepted, time.monotonic()
        if world.until(lambda: world.robot.accepted > accepted, RECOVERY_S):
            return time.monotonic() - since
        world.violated(f'no trajectory within {RECOVERY_S:g} s after it')
    except Violated as violation:
        world.violated(str(violation))
    bring_back(world)
    return None


def bring_back(world: World) -> None:
    """After a violation the run goes on with a new process."""
    world.silent.clear()
    if not world.process.ended:
        world.end_node(signal.SIGKILL, 10.0)
    world.start_node()


def soak(world: World, minutes: float, chosen: list[str] | None) -> dict[str, list[float]]:
    """Inject faults until so much simulated time is over; recovery times per fault."""
    recovered: dict[str, list[float]] = defaultdict(list)
    for name in schedule(world.rng, chosen):
        seconds = inject(world, name)
        recovered[name] += [] if seconds is None else [round(seconds, 2)]
        world.fault = 'none'
        world.advance(world.rng.uniform(0.5, 3))
        world.process.sample()
        print(f'{world.simulated_ns / 6e10:6.2f} min  {name}: ' + (
            'not survived' if seconds is None else f'recovered in {seconds:.2f} s'), flush=True)
        if world.simulated_ns > minutes * 6e10 and (not chosen or len(recovered) == len(chosen)):
            return recovered


def check_library(world: World) -> dict[str, Any]:
    """Nothing that was saved is lost but what was damaged on purpose; after a repair nothing is wrong."""
    def verify(*options: str) -> subprocess.CompletedProcess:
        command = [sys.executable, '-m', 'rmuscle_core.cli', 'library', 'verify', str(world.library), *options]
        return subprocess.run(command, capture_output=True, text=True)
    repaired = verify('--repair')
    whole = verify()
    if repaired.returncode not in (0, 1) or whole.returncode:
        world.violated(f'the library is not whole after its repair: {repaired.stdout} {whole.stdout} {whole.stderr}')
    lost = sorted(str(path) for path in world.saved - world.damaged if not path.exists())
    for path in lost:
        world.violated(f'the saved episode {path} is lost')
    return {'saved': len(world.saved), 'damaged_on_purpose': len(world.damaged), 'lost': len(lost)}


def check_process(world: World) -> dict[str, Any]:
    """Growth of every life, and what was not foreseen."""
    growth = [g for g in (life.growth() for life in world.process.lives) if g]
    for found in growth:
        for name, bound in BOUNDS.items():
            if found[name] > bound:
                world.violated(f'{name} grew by {found[name]:g} within a life, the bound is {bound:g}')
    for line in sorted(set(world.process.tracebacks())):
        world.violated(f'not foreseen, in the log: {line}')
    largest = max((s[1] for life in world.process.lives for s in life.samples), default=0.0)
    return {'lives': len(world.process.lives), 'exit_codes': [life.code for life in world.process.lives],
            'growth_per_life': growth, 'bounds': BOUNDS, 'largest_memory_mb': round(largest)}


def run(world: World, options: argparse.Namespace) -> dict[str, Any]:
    since = time.monotonic()
    world.start_node()
    record_library(world)
    recovered = soak(world, options.minutes, options.fault)
    wall_s = time.monotonic() - since
    world.fault = 'end'
    code = world.end_node(signal.SIGTERM, 15.0)
    if code != 0:
        world.violated(f'the exit code is {code}')
    found = {'library': check_library(world), 'process': check_process(world)}
    robot = world.robot
    simulated_s = world.simulated_ns / 1e9
    return {'seed': options.seed, 'simulated_minutes': round(simulated_s / 60, 2),
            'wall_minutes': round(wall_s / 60, 2), 'factor': round(simulated_s / wall_s, 2), 'kinds': len(recovered),
            'faults': sum(map(len, recovered.values())), 'trajectories': robot.accepted, 'holds': robot.holds,
            'refused_while_the_clock_was_set': robot.excused, 'ended_on_the_way': robot.late,
            'largest_step': round(robot.largest_step, 4),
            'recovery_s': {n: {'times': len(s), 'median': statistics.median(s), 'largest': max(s)}
                           for n, s in sorted(recovered.items()) if s},
            **found, 'violations': world.violations}


def main() -> int:
    parser = argparse.ArgumentParser(prog='python bench/soak', description=__doc__.split('\n')[0])
    parser.add_argument('--minutes', type=float, default=30.0, help='simulated (default 30)')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--factor', type=float, default=4.0, help='simulated per real second, at most (default 4)')
    parser.add_argument('--fault', action='append', choices=[*FAULTS, *ENDING], help='only this; may be repeated')
    parser.add_argument('--checkpoint', type=Path, default=ROOT / 'config/policy/transfer_cube')
    parser.add_argument('--json', type=Path, help='write the figures to this file')
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix='soak-'))
    arguments = ['--params-file', str(parameters(folder, options.checkpoint.resolve(), folder / 'library')),
                 '-r', '__ns:=/soak']
    rclpy.init(signal_handler_options=SignalHandlerOptions.NO)
    process = NodeProcess(arguments, folder / 'node.log')
    world = World(process, folder / 'library', options.seed, options.factor)
    try:
        found = run(world, options)
    finally:
        if process.lives and not process.ended:
            process.signal(signal.SIGKILL)
        world.close()
    text = json.dumps(found, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text)
    if found['violations']:
        print(f'the log, the library and the parameters are in {folder}', file=sys.stderr)
        return 1
    return 0


if __name__ == '__main__':
    sys.exit(main())
