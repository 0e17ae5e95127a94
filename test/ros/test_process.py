# SPDX-License-Identifier: Apache-2.0
"""The node as a process: parameters from a file and the command line, Ctrl-C in every state."""

from __future__ import annotations

import itertools
import signal
import time
from pathlib import Path

import pytest
import yaml
from child import Child, Robot
from lifecycle_msgs.srv import GetState
from std_srvs.srv import SetBool
from trajectory_msgs.msg import JointTrajectory

from rmuscle_core.cli import main
from rmuscle_core.settings import PROFILES, Settings
from rmuscle_ros.params import NodeSettings

ROOT = Path(__file__).parents[2]
FAILING = """
import torch
class Policy(EchoPolicy):
    def infer(self, *arguments):
        chunk = super().infer(*arguments)
        say('called')
        {raises}
        return chunk
"""
HIDING = """
import signal
from rclpy.node import Node
from rmuscle_ros.spin import run

class Hiding(Node):
    fatal = False
    in_transition = True  # so that the signal arrives as an exception

    def __init__(self):
        super().__init__('hiding')
        self.create_timer(0.01, self.hide)

    def hide(self):
        try:
            signal.raise_signal(signal.{number})
        except KeyboardInterrupt:
            {then}

    def close(self):
        print('closed', flush=True)

raise SystemExit(run(Hiding))
"""


# state -> what holds the process in it: real computing or a real write that never ends by itself
STATES = {
    'unconfigured': '',
    'configuring': """
from rmuscle_core.policy import MusclePolicy
warm_up = MusclePolicy.warm_up
def endless(self, prompt):
    say('configuring')
    while True:
        warm_up(self, prompt)
MusclePolicy.warm_up = endless
""",
    'inferring': """
from rmuscle_core.engine.eager import EagerEngine
act = EagerEngine.act
def endless(self, *arguments):
    say('inferring')
    while threading.current_thread().name == 'inference':
        act(self, *arguments)
    return act(self, *arguments)
EagerEngine.act = endless
""",
    'reconstructing': """
from rmuscle_core.engine.eager import EagerEngine
expand = EagerEngine.expand
def endless(self, *arguments):
    say('reconstructing')
    while True:
        expand(self, *arguments)
EagerEngine.expand = endless
""",
    'recording': """
from rmuscle_core.library import durable
sync, written = durable.sync, []
def endless(path):
    if path.name.endswith('.h5.tmp'):
        written.append(path)
        if len(written) == 2:
            say('recording')
            time.sleep(60)
    sync(path)
durable.sync = endless
""",
}


@pytest.fixture
def robot(ros_context):
    """A robot in the namespace of the child."""
    robot = Robot('/process')
    yield robot
    robot.close()


@pytest.mark.parametrize(('state', 'number'), [
    ('unconfigured', signal.SIGTERM), *itertools.product(list(STATES)[1:], [signal.SIGINT, signal.SIGTERM])])
def test_v28_a_signal_ends_any_state_in_time_and_leaves_a_sound_library(robot, checkpoint, tmp_path, state, number):
    library = tmp_path / 'library'
    child = robot.start(STATES[state], real=True, checkpoint=checkpoint, library=library)
    try:
        if state != 'unconfigured':
            configured = robot.change('configure')
        if state not in ('unconfigured', 'configuring'):
            robot.until(configured.done, 'configure', send=False)
            assert robot.changed('activate')
        if state == 'recording':
            robot.until(lambda: robot.call(SetBool, 'save_episode', SetBool.Request(data=True)).success, 'an episode')
            robot.keep_asking(SetBool, 'save_episode', SetBool.Request(data=True), lambda: state in child.lines)
        robot.until(lambda: state in [*child.lines, 'unconfigured'], state)
        since = time.monotonic()
    finally:
        code, errors = child.ends(number)
    assert time.monotonic() - since < 5
    assert code == 0 and 'Traceback' not in errors, errors
    if library.exists():
        assert main(['library', 'verify', str(library)]) == 0


def test_a_lost_device_ends_the_process_with_a_hold_and_code_1(robot):
    """So that a supervisor starts it again: in this process nothing on the device works any more."""
    commands = []
    robot.node.create_subscription(JointTrajectory, 'joint_trajectory', commands.append, 10)
    child = robot.start(FAILING.format(
        raises="if len(self.seen) > 1: raise DeviceError('the device failed; start again')"))
    assert robot.changed('configure') and robot.changed('activate')
    robot.until(lambda: child.process.poll() is not None, 'the end', ended=True)
    code, errors = child.ends()
    assert code == 1 and 'the device failed; start again' in errors and 'Traceback' not in errors, errors
    robot.until(lambda: len(commands) == 2, 'the hold', send=False, ended=True)
    assert [len(command.points) == 1 for command in commands] == [False, True]


def test_a_node_that_ended_is_gone_from_the_graph(robot):
    """Else requests go to its services for as long as the middleware believes in them, and get no answer."""
    child = robot.start('class Policy(EchoPolicy): pass')
    client = robot.node.create_client(GetState, 'policy_node/get_state')
    robot.until(client.service_is_ready, 'discovery', send=False)
    assert child.ends(signal.SIGTERM)[0] == 0
    robot.until(lambda: not client.service_is_ready(), 'the end', timeout_s=8, send=False, ended=True)  # lease: 20 s


def test_other_failures_leave_the_process_alive(robot):
    child = robot.start(FAILING.format(
        raises="raise RuntimeError('CUDA out of memory' if len(self.seen) % 2 else 'broken')"))
    assert robot.changed('configure') and robot.changed('activate')
    robot.until(lambda: child.lines.count('called') >= 3, 'three calls')
    assert robot.changed('deactivate')
    assert child.ends(signal.SIGTERM)[0] == 0


@pytest.mark.parametrize('number', ['SIGINT', 'SIGTERM'])
@pytest.mark.parametrize('then', ['pass', 'raise RuntimeError', 'raise ValueError("from C++")'])
def test_a_signal_that_another_layer_hides_ends_cleanly_too(number, then):
    child = Child('-c', HIDING.format(number=number, then=then))
    code, errors = child.ends()
    assert (code, child.lines) == (0, ['closed']) and 'Traceback' not in errors, errors


@pytest.mark.parametrize('name', ['control_rate_hz', 'use_sim_time'])
def test_bad_parameter_is_one_line_and_exit_code_2(name):
    code, errors = Child(ROOT / 'rmuscle_ros/scripts/policy_node', '--ros-args', '-p', f'{name}:=fast').ends()
    lines = [line for line in errors.splitlines() if line]
    assert code == 2 and len(lines) == 1 and name in lines[0] and 'fast' in lines[0], errors


@pytest.mark.parametrize('profile', PROFILES)
def test_shipped_profiles_reach_the_node_in_any_namespace(ros_context, profile):
    from rmuscle_ros.node import PolicyNode
    arguments = ['--ros-args']
    for name in ('default', profile):
        arguments += ['--params-file', str(ROOT / 'config' / f'{name}.yaml')]
    node = PolicyNode(namespace='/cell_a', cli_args=arguments)
    try:
        ratios = tuple(node.get_parameter(name).value for name in ('token_ratio', 'neuron_ratio'))
        assert ratios == PROFILES[profile] and node.get_parameter('profile').value == profile
    finally:
        node.close()
        node.destroy_node()


def test_default_file_lists_every_parameter_with_its_default():
    listed = yaml.safe_load((ROOT / 'config/default.yaml').read_text())['/**']['ros__parameters']
    tables = {**vars(Settings()), **vars(NodeSettings())}
    left_out = {'checkpoint', 'joint_names', 'cameras', 'masked_cameras', 'token_ratio', 'neuron_ratio'}
    expected = {name: value for name, value in tables.items() if name not in left_out}
    assert {n: list(v) if isinstance(v, tuple) else v for n, v in expected.items()} == listed


def test_work_cell_file_names_its_joints_and_cameras(ros_context):
    pytest.importorskip('gym_aloha', reason='needs the extra workcell')
    from rmuscle_core.workcell.cell import CAMERAS, CONTROL_RATE, JOINTS
    from rmuscle_ros.node import PolicyNode
    node = PolicyNode(cli_args=['--ros-args', '--params-file', str(ROOT / 'config/workcell.yaml')])
    try:
        options = node._params.node_settings
        assert options.joint_names == JOINTS and options.cameras == CAMERAS and options.control_rate_hz == CONTROL_RATE
        assert node.get_parameter('use_sim_time').value and options.blend_s == 0
    finally:
        node.close()
        node.destroy_node()
