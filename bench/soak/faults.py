# SPDX-License-Identifier: Apache-2.0
"""Faults of robots, machines, disks and people. Each changes the world for a while and puts it right again.

After each the soak waits for the next trajectory. ``FAULTS`` is their list; ``ENDING`` those that end the process.
"""

from __future__ import annotations

import array
import random
import signal
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

from rmuscle_core.settings import ON_CONFIGURE, rows

NAN, INFINITY = float('nan'), float('inf')
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
    changes(world, 'deactivate', 'activate')


@fault('cleaned up and configured')
def reconfigured(world: World, rng: random.Random) -> None:
    changes(world, 'deactivate', 'cleanup', 'configure', 'activate')


def changes(world: World, *transitions: str) -> None:
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
