# SPDX-License-Identifier: Apache-2.0
"""The node as a process: parameters from a file and the command line, Ctrl-C in every state."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml

from rmuscle_core.settings import PROFILES, Settings
from rmuscle_ros.params import NodeSettings

ROOT = Path(__file__).parents[2]
NODE = """
import sys, threading, time
sys.path.insert(0, {tests!r})
from conftest import ARM7, EchoPolicy
from rclpy.parameter import Parameter
from rmuscle_ros.node import PolicyNode
from rmuscle_ros.spin import run

def say(word):
    print(word, flush=True)

class Policy(EchoPolicy):
    def warm_up(self, prompt):
        say('warming')
        if {state!r} == 'configuring':
            time.sleep(60)

    def infer(self, observation):
        say('inferring')
        threading.Event().wait()

def make():
    values = dict(checkpoint='c', prompt='p', joint_names=list(ARM7), cameras=['base', 'wrist'])
    node = PolicyNode(namespace='/process', config_loader=lambda _: EchoPolicy.config,
                      policy_factory=lambda *_: Policy(),
                      parameter_overrides=[Parameter(n, value=v) for n, v in values.items()])
    say('made')
    if {state!r} != 'unconfigured':
        node.trigger_configure()
        node.trigger_activate()
        say('active')
    return node

raise SystemExit(run(make))
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


class Child:
    """A process whose lines are read as they come."""

    def __init__(self, *arguments):
        self.process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                        text=True)
        self.lines, self.errors = [], []
        self._readers = [threading.Thread(target=self._read, args=pair) for pair in
                         ((self.process.stdout, self.lines), (self.process.stderr, self.errors))]
        for reader in self._readers:
            reader.start()

    @staticmethod
    def _read(stream, lines):
        for line in stream:
            lines.append(line.rstrip())

    def ends(self, number=None, timeout_s=20.0):
        """Send a signal, wait for the end; returns exit code and stderr."""
        if number is not None:
            self.process.send_signal(number)
        try:
            code = self.process.wait(timeout_s)
        finally:
            self.process.kill()
            for reader in self._readers:
                reader.join()
        return code, '\n'.join(self.errors)


@pytest.mark.parametrize(('state', 'word', 'number'), [
    ('unconfigured', 'made', signal.SIGINT), ('configuring', 'warming', signal.SIGINT),
    ('active', 'inferring', signal.SIGINT), ('active', 'inferring', signal.SIGTERM)])
def test_interrupt_ends_cleanly_in_any_state(make_bench, state, word, number):
    child = Child('-c', NODE.format(tests=str(Path(__file__).parent), state=state))
    robot = make_bench(namespace='/process')  # publishes what the child in the same namespace subscribes to
    robot.until(lambda: (robot.send(), word in child.lines)[1], word, timeout_s=30)
    code, errors = child.ends(number)
    assert code == 0 and 'Traceback' not in errors, errors


@pytest.mark.parametrize('number', ['SIGINT', 'SIGTERM'])
@pytest.mark.parametrize('then', ['pass', 'raise RuntimeError', 'raise ValueError("from C++")'])
def test_a_signal_that_another_layer_hides_ends_cleanly_too(number, then):
    child = Child('-c', HIDING.format(number=number, then=then))
    code, errors = child.ends()
    assert (code, child.lines) == (0, ['closed']) and 'Traceback' not in errors, errors


def test_bad_parameter_is_one_line_and_exit_code_2():
    code, errors = Child(ROOT / 'rmuscle_ros/scripts/policy_node', '--ros-args', '-p', 'control_rate_hz:=fast').ends()
    lines = [line for line in errors.splitlines() if line]
    assert code == 2 and len(lines) == 1 and 'control_rate_hz' in lines[0] and 'fast' in lines[0], errors


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
