# SPDX-License-Identifier: Apache-2.0
"""Faults of robots, machines, disks and people. Each changes the world for a while and puts it right again.

After each the soak waits for the next trajectory. ``FAULTS`` is their list; ``ENDING`` those that end the process.
"""

from __future__ import annotations

import array
import contextlib
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import rclpy
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState
from rcl_interfaces.srv import SetParameters
from rclpy.node import Node
from rclpy.parameter import Parameter
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from robot import JOINTS
from sensor_msgs.msg import Image, JointState
from std_msgs.msg import String
from std_srvs.srv import SetBool, Trigger
from world import CAMERAS, LATCHED, RELIABLE, Violated, World

from rmuscle_core.errors import RMuscleError
from rmuscle_core.library import EpisodeLibrary, ReferenceId
from rmuscle_core.settings import ON_CONFIGURE, rows

NAN, INFINITY = float('nan'), float('inf')
FILE_LIMIT = 4096  # bytes; every file of the node that grows beyond meets a full disk
PROMPTS = ('transfer cube', 'sort the screws', 'räume auf, bitte', 'x' * 5000, ' ', '../../etc', '\n\t')
Fault = Callable[[World, random.Random], None]
FAULTS: dict[str, Fault] = {}
ENDING: dict[str, Fault] = {}


def fault(name: str, among: dict[str, Fault] = FAULTS) -> Callable[[Fault], Fault]:
    def add(function: Fault) -> Fault:
        among[name] = function
        return function
    return add


# Inputs ---

@fault('camera lost')
def camera_lost(world: World, rng: random.Random) -> None:
    _without(world, rng, rng.choice(CAMERAS))


@fault('joint states lost')
def joints_lost(world: World, rng: random.Random) -> None:
    _without(world, rng, 'joints')


def _without(world: World, rng: random.Random, source: str) -> None:
    world.silent.add(source)
    with world.no_answer_expected():
        world.advance(rng.uniform(1, 4))
    world.silent.discard(source)


@fault('camera frozen')
def camera_frozen(world: World, rng: random.Random) -> None:
    """It goes on sending the frame it had, with the stamp of then."""
    camera, frame = rng.choice(CAMERAS), world.view(CAMERAS[0])
    _pictures(world, rng, lambda c, message: frame if c == camera else message)


@fault('frames damaged')
def frames_damaged(world: World, rng: random.Random) -> None:
    def damage(_camera: str, message: Image) -> Image:
        field, value = rng.choice((('data', array.array('B', message.data[:rng.randrange(999)])), ('height', 2**31),
                                   ('step', rng.randrange(200)), ('encoding', rng.choice(('', '16UC1', 'nv12', 'ä')))))
        setattr(message, field, value)
        return message
    _pictures(world, rng, damage)


@fault('stamps of another clock')
def foreign_stamps(world: World, rng: random.Random) -> None:
    ahead_s = rng.choice((-100.0, -3.0, 0.3, 20.0))
    _pictures(world, rng, lambda _, message: world.stamp(message, ahead_s))


def _pictures(world: World, rng: random.Random, instead: Callable[[str, Image], Image]) -> None:
    whole, world.picture = world.picture, instead
    with world.no_answer_expected():
        world.advance(rng.uniform(1, 4))
    world.picture = whole


@fault('joint values not finite')
def joints_not_finite(world: World, rng: random.Random) -> None:
    def damage(message: JointState) -> JointState:
        for i in rng.sample(range(len(message.position)), rng.randint(1, len(message.position))):
            message.position[i] = rng.choice((NAN, INFINITY, -INFINITY))
        return message
    _joints(world, rng, damage)


@fault('joint messages of others')
def foreign_joints(world: World, rng: random.Random) -> None:
    """Between the robot's own: other robots' joints, names twice, names without positions."""
    publisher = world.node.create_publisher(JointState, 'joint_states', RELIABLE)
    for _ in range(20):
        names = rng.choice((['wheel', 'lift'], [JOINTS[0]] * 2, list(JOINTS), ['']))
        values = [NAN] * rng.choice((len(names), 1, 0))
        publisher.publish(world.stamp(JointState(name=names, position=values)))
        world.tick()
    world.node.destroy_publisher(publisher)


@fault('joint publisher restarts in another order')
def joint_order(world: World, rng: random.Random) -> None:
    """And with its joints shared out over one, two or three publishers."""
    for publisher in world.joint_publishers:
        world.node.destroy_publisher(publisher)
    world.joint_publishers = []
    with world.no_answer_expected():
        world.advance(1.0)
    rng.shuffle(world.order)
    world.joint_publishers = [world.node.create_publisher(JointState, 'joint_states', RELIABLE)
                              for _ in range(rng.randint(1, 3))]


def _joints(world: World, rng: random.Random, instead: Callable[[JointState], JointState]) -> None:
    whole, world.joints = world.joints, instead
    with world.no_answer_expected():
        world.advance(rng.uniform(1, 4))
    world.joints = whole


@fault('publishers that do not fit')
def misfits(world: World, rng: random.Random) -> None:
    """A best-effort and volatile publisher of prompts, and one of pictures where joint states belong."""
    stranger = rclpy.Context()  # a process has one type for a topic; this is as good as another process
    stranger.init()
    node = Node('stranger', namespace='/soak', context=stranger)
    publishers = [(node.create_publisher(String, 'prompt', QoSProfile(
                       depth=1, durability=DurabilityPolicy.VOLATILE, reliability=ReliabilityPolicy.BEST_EFFORT)),
                   String(data='ignored')),
                  (node.create_publisher(Image, 'joint_states', RELIABLE), Image())]
    for _ in range(15):
        for publisher, message in publishers:
            publisher.publish(message)
        world.tick()
    node.destroy_node()
    stranger.try_shutdown()


# Time ---

@fault('clock set back')
def clock_back(world: World, rng: random.Random) -> None:
    world.set_clock(-rng.choice((0.2, 1.0, 5.0, 60.0)))
    world.advance(1.0)


@fault('clock set ahead')
def clock_ahead(world: World, rng: random.Random) -> None:
    world.set_clock(rng.choice((1.0, 5.0, 60.0)))
    world.advance(1.0)


@fault('node held up')
def held_up(world: World, rng: random.Random) -> None:
    """SIGSTOP and, later, SIGCONT: a machine that swaps, a debugger."""
    world.process.signal(signal.SIGSTOP)
    with world.no_answer_expected():
        world.advance(rng.uniform(0.5, 6))
    world.process.signal(signal.SIGCONT)
    world.excuse()


# People ---

@lru_cache(maxsize=1)
def live_parameters() -> dict[str, Any]:
    """What may be changed while the node runs, with its defaults."""
    from dataclasses import fields

    from rmuscle_ros.params import NodeSettings
    return {row.name: row.default for row in (*rows(), *fields(NodeSettings))
            if row.metadata['effect'] != ON_CONFIGURE and row.name != 'prompt'}


@fault('parameter storm')
def parameter_storm(world: World, rng: random.Random) -> None:
    """Values right and wrong for anything, then the defaults again, which must be accepted."""
    values = (True, 0, 1, -1, 0.5, 1e9, NAN, 'full', 'exp', '', [1.0], ['a'], [0.1] * 14, 0.02, 'dense',
              'previous_call')
    names = (*live_parameters(), 'prompt', 'joint_names', 'checkpoint', 'no_such', 'use_sim_time')
    with world.no_answer_expected():
        for _ in range(8):
            wanted = [Parameter(rng.choice(names), value=rng.choice(values)) for _ in range(5)]
            _set(world, wanted)
            world.tick()
    world.excuse()  # use_sim_time may have been among them
    after = {'use_sim_time': True, **live_parameters(), 'prompt': PROMPTS[0]}
    refused = [r.reason for r in _set(world, [Parameter(n, value=v) for n, v in after.items()]) if not r.successful]
    if refused:
        raise Violated(f'a default was refused: {refused[0]}')
    _start_again(world)


def _set(world: World, parameters: list[Parameter]) -> list[Any]:
    request = SetParameters.Request(parameters=[p.to_parameter_msg() for p in parameters])
    return world.call(SetParameters, 'set_parameters', request).results


def _start_again(world: World) -> None:
    """As a person would after three failed calls in a row, for which the node stops on purpose."""
    if not world.call(Trigger, 'start', Trigger.Request()).success:
        raise Violated('~/start was refused')


@fault('prompts')
def prompts(world: World, rng: random.Random) -> None:
    """Other tasks, odd texts; the last, empty, means the parameter again."""
    for _ in range(4):
        world.prompt.publish(String(data=rng.choice(PROMPTS)))
        world.advance(rng.uniform(0.2, 2))
    world.prompt.publish(String())
    world.advance(0.5)
    _start_again(world)


@fault('prompt publisher restarts')
def prompt_publisher(world: World, rng: random.Random) -> None:
    world.node.destroy_publisher(world.prompt)
    world.advance(0.5)
    world.prompt = world.node.create_publisher(String, 'prompt', LATCHED)


@fault('deactivated and activated')
def reactivated(world: World, rng: random.Random) -> None:
    _changes(world, 'deactivate', 'activate')


@fault('cleaned up and configured')
def reconfigured(world: World, rng: random.Random) -> None:
    _changes(world, 'deactivate', 'cleanup', 'configure', 'activate')


def _changes(world: World, *transitions: str) -> None:
    for transition in transitions:
        # the one transition that may have to wait for a call in flight, and says so
        if not (world.change(transition) or (transition == 'cleanup' and world.change(transition))):
            raise Violated(f'{transition} failed; see {world.process.log}')


@fault('transitions out of turn')
def out_of_turn(world: World, rng: random.Random) -> None:
    for number in (Transition.TRANSITION_ACTIVATE, Transition.TRANSITION_CONFIGURE, Transition.TRANSITION_CLEANUP, 200):
        request = ChangeState.Request(transition=Transition(id=number))
        if world.call(ChangeState, 'change_state', request).success:
            raise Violated(f'transition {number} of an active node succeeded')


@fault('start and stop storm')
def start_stop(world: World, rng: random.Random) -> None:
    for _ in range(6):
        world.call(Trigger, rng.choice(('start', 'stop', 'stop')), Trigger.Request())
        world.advance(rng.choice((0.0, 0.3, 1.0)))
    _start_again(world)


@fault('episode storm')
def episode_storm(world: World, rng: random.Random) -> None:
    """Saves and resets, all asked for at once."""
    asked = []
    for _ in range(6):
        if rng.random() < 0.5:
            asked.append((world.ask(Trigger, 'reset_episode', Trigger.Request()), False))
        else:
            asked.append((world.ask(SetBool, 'save_episode', SetBool.Request(data=rng.random() < 0.7)), True))
        world.advance(rng.choice((0.0, 0.5, 2.0)))
    for future, saving in asked:
        answer = world.answer(future, 'save_episode' if saving else 'reset_episode')
        if saving and answer.success:
            world.saved.add(Path(answer.message))
        elif not answer.success and (not answer.message.strip() or '\n' in answer.message):
            raise Violated(f'not one sentence: {answer.message!r}')


# The disk ---

@fault('library grows by another process')
def library_grows(world: World, rng: random.Random) -> None:
    """A whole episode, and things that are none."""
    library = EpisodeLibrary.open(world.library, set_aside=False)
    usable = [e for e in library.episodes if e.path not in world.damaged]
    if usable:
        source, name = rng.choice(usable), f'copy-{time.monotonic_ns()}'
        with contextlib.suppress(RMuscleError):  # the source was set aside meanwhile
            references = [library.load(ReferenceId(source.task, source.episode, call))
                          for call in range(len(source.keys))]
            world.saved.add(library.add_episode(source.task, references, True, name))
    (world.library / 'notes.txt').write_text('not an episode')
    stray = world.library / 'transfer-cube' / f'stray-{time.monotonic_ns()}.h5'
    stray.parent.mkdir(exist_ok=True)
    stray.write_bytes(rng.randbytes(5000))
    world.advance(1.0)
    _changes(world, 'deactivate', 'cleanup', 'configure', 'activate')


@fault('library file damaged')
def library_damaged(world: World, rng: random.Random) -> None:
    """Bytes of a stored episode change under the node, or its end is cut off."""
    files = sorted(path for path in world.saved if path.exists())
    if files:
        path = rng.choice(files)
        world.damaged.add(path)
        with path.open('r+b') as file:
            size = path.stat().st_size
            if rng.random() < 0.3:
                file.truncate(size // 2)
            for _ in range(50):
                file.seek(rng.randrange(size))
                file.write(rng.randbytes(8))
    world.call(Trigger, 'reset_episode', Trigger.Request())
    world.advance(2.0)


@fault('library gone for a while')
def library_gone(world: World, rng: random.Random) -> None:
    """As when a disk is unmounted; saving must be refused meanwhile."""
    elsewhere = world.library.with_suffix('.elsewhere')
    world.library.rename(elsewhere)
    world.advance(1.0)
    answer = world.call(SetBool, 'save_episode', SetBool.Request(data=True))
    world.advance(1.0)
    if world.library.exists():
        raise Violated(f'a library was made where the other had been: {answer.message}')
    elsewhere.rename(world.library)
    if answer.success:
        raise Violated(f'an episode was saved to a folder that is not there: {answer.message}')


@fault('library read-only')
def library_read_only(world: World, rng: random.Random) -> None:
    """What needs writing is refused, or done where permissions do not hold (root); nothing ends."""
    folders = [world.library, *(p for p in world.library.iterdir() if p.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    world.advance(1.0)
    answer = world.call(SetBool, 'save_episode', SetBool.Request(data=True))
    for folder in folders:
        folder.chmod(0o755)
    if answer.success:
        world.saved.add(Path(answer.message))


@fault('disk full')
def disk_full(world: World, rng: random.Random) -> None:
    """No file of the process may grow: not the library's, not its log."""
    _, hard = resource.prlimit(world.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(world.process.pid, resource.RLIMIT_FSIZE, (FILE_LIMIT, hard))
    world.advance(2.0)
    answer = world.call(SetBool, 'save_episode', SetBool.Request(data=True))
    world.advance(1.0)
    resource.prlimit(world.process.pid, resource.RLIMIT_FSIZE, (hard, hard))
    if answer.success:
        raise Violated(f'an episode was saved to a full disk: {answer.message}')


@fault('junk beside the library')
def junk(world: World, rng: random.Random) -> None:
    """Folders and names that no library has."""
    for name in ('a b', 'ümlaut', '.hidden', 'x' * 100):
        (world.library / name).mkdir(exist_ok=True)
        (world.library / name / 'y.h5').write_bytes(b'')
    world.call(Trigger, 'reset_episode', Trigger.Request())
    world.advance(1.0)
    for name in ('a b', 'ümlaut', '.hidden', 'x' * 100):
        shutil.rmtree(world.library / name)


# The process ---

@fault('killed', ENDING)
def killed(world: World, rng: random.Random) -> None:
    """SIGKILL in the middle of whatever it does, at times of saving."""
    if rng.random() < 0.5:
        world.ask(SetBool, 'save_episode', SetBool.Request(data=True))
        world.advance(rng.choice((0.0, 0.1, 0.5)))
    code = world.end_node(signal.SIGKILL, 10.0)
    if code != -signal.SIGKILL:
        raise Violated(f'killed, but the exit code is {code}')
    world.start_node()


@fault('terminated', ENDING)
def terminated(world: World, rng: random.Random) -> None:
    """SIGTERM or SIGINT: the robot is told to hold, the exit code is 0."""
    number, holds = rng.choice((signal.SIGTERM, signal.SIGINT)), world.robot.holds
    code = world.end_node(number, 15.0)
    world.tick()
    if code != 0:
        raise Violated(f'{number.name}: exit code {code}')
    if world.robot.holds == holds:
        raise Violated(f'{number.name}: no hold was sent')
    world.start_node()
