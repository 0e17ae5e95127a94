# SPDX-License-Identifier: Apache-2.0
"""The policy node in a process of its own, and a robot that feeds it from this one."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.qos import QoSProfile, ReliabilityPolicy
from robot_bench import ARM7, sentinel, stamp_message
from sensor_msgs.msg import Image, JointState

TESTS = Path(__file__).parents[1]
# The node; {changes} may replace parts of it, ``say`` a word on standard output, and must define make_policy.
NODE = """
import sys, threading, time
sys.path[:0] = {tests!r}
import torch
torch.set_num_threads(1)
from robot_bench import ARM7, EchoPolicy
from rclpy.parameter import Parameter
from rmuscle_core.errors import DeviceError
from rmuscle_ros.node import PolicyNode
from rmuscle_ros.spin import run

def say(word):
    print(word, flush=True)

{changes}

def make():
    values = dict(checkpoint={checkpoint!r}, library={library!r}, prompt='lift', joint_names=list(ARM7), device='cpu',
                  cameras=['base', 'wrist'], stall_timeout_s=60.0)
    loaders = {{}} if {real} else dict(config_loader=lambda _: EchoPolicy.config, policy_factory=lambda *_: Policy())
    overrides = [Parameter(name, value=value) for name, value in values.items()]
    node = Node(namespace={namespace!r}, parameter_overrides=overrides, **loaders)
    say('made')
    return node

raise SystemExit(run(make))
"""


class Child:
    """A process whose lines are read as they come."""

    def __init__(self, *arguments):
        self.process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                        text=True)
        self.lines, self.errors = [], []
        self._readers = [threading.Thread(target=self._read, args=pair, daemon=True) for pair in
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


class Robot:
    """Joint states, images, and calls of the services of a node that it starts in its own namespace."""

    def __init__(self, namespace):
        self.namespace, self.child = namespace, None
        self.node = Node('robot', namespace=namespace)
        self.executor = SingleThreadedExecutor()
        self.executor.add_node(self.node)
        reliable = QoSProfile(depth=50, reliability=ReliabilityPolicy.RELIABLE)
        self.joints = self.node.create_publisher(JointState, 'joint_states', reliable)
        self.images = [self.node.create_publisher(Image, f'{c}/image_raw', reliable) for c in ('base', 'wrist')]
        self._clients = {}

    def start(self, changes, real=False, checkpoint='some/checkpoint', library=''):
        """Start NODE with these changes and wait until it is made; ``real``: its policy is loaded from a checkpoint."""
        changes = f'Node = PolicyNode\n{changes}'
        self.child = Child('-c', NODE.format(
            tests=[p for p in sys.path if Path(p).is_relative_to(TESTS)], changes=changes, real=real,
            checkpoint=str(checkpoint), library=str(library), namespace=self.namespace))
        self.until(lambda: 'made' in self.child.lines, 'the node', send=False)
        return self.child

    def send_joints(self, value=0.0):
        message = JointState(name=list(ARM7), position=[float(value)] * len(ARM7))
        self.joints.publish(stamp_message(message, self.node.get_clock().now().nanoseconds))

    def send(self):
        """One complete observation."""
        for publisher in self.images:
            publisher.publish(stamp_message(sentinel(1), self.node.get_clock().now().nanoseconds))
        self.send_joints()

    def until(self, condition, what, timeout_s=60.0, send=True, ended=False):
        """Spin, and send observations, until the condition holds."""
        end = time.monotonic() + timeout_s
        while not condition():
            assert ended or self.child.process.poll() is None, '\n'.join(self.child.errors)
            assert time.monotonic() < end, f'{what} did not happen within {timeout_s} s'
            if send:
                self.send()
            self.executor.spin_once(timeout_sec=0.02)

    def ask(self, kind, service, request):
        """Call a service of the node; returns the future."""
        if service not in self._clients:
            self._clients[service] = self.node.create_client(kind, f'policy_node/{service}')
        client = self._clients[service]
        self.until(client.service_is_ready, f'{service} ready', send=False)
        return client.call_async(request)

    def call(self, kind, service, request):
        future = self.ask(kind, service, request)
        self.until(future.done, f'answer of {service}', send=False)
        return future.result()

    def keep_asking(self, kind, service, request, enough):
        """Call a service again and again, the last time without an answer, until ``enough()``."""
        future = self.ask(kind, service, request)
        while not enough():
            self.until(lambda future=future: future.done() or enough(), f'answer of {service}')
            if future.done():
                future = self.ask(kind, service, request)

    def change(self, transition):
        return self.ask(ChangeState, 'change_state', ChangeState.Request(
            transition=Transition(id=getattr(Transition, f'TRANSITION_{transition.upper()}'))))

    def changed(self, transition):
        future = self.change(transition)
        self.until(future.done, transition, send=False)
        return future.result().success

    def close(self):
        if self.child is not None:
            self.child.process.kill()
        self.executor.shutdown()
        self.node.destroy_node()
