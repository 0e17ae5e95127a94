# SPDX-License-Identifier: Apache-2.0
"""A policy node, a robot that feeds it, and a clock to wait by: all in one process, on a real ROS graph."""

from __future__ import annotations

import array
import itertools
import time
from types import SimpleNamespace

import numpy as np
from jtc_rules import rejection
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState, GetState
from rcl_interfaces.srv import GetParameters, SetParameters, SetParametersAtomically
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.parameter import Parameter
from rclpy.qos import QoSProfile, ReliabilityPolicy
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import Image, JointState
from std_srvs.srv import SetBool, Trigger
from trajectory_msgs.msg import JointTrajectory

from rmuscle.msg import ActionChunk as ActionChunkMessage
from rmuscle.msg import CacheStatus
from rmuscle_core.observation import ActionChunk, CallReport
from rmuscle_core.settings import Settings
from rmuscle_ros.node import PolicyNode
from rmuscle_ros.params import named

ARM7 = ('j1', 'j2', 'j3', 'j4', 'j5', 'j6', 'gripper')
NUMBER = itertools.count()


class EchoPolicy:
    """Answers state + 0.01 * (k + 1) for each of 16 steps, and remembers what it was given.

    gate: called in every infer, on the inference thread, with the policy; may block, or return another chunk.
    """

    config = SimpleNamespace(cameras=('base', 'wrist'), state_dim=7, action_dim=7, chunk_size=16, execute_steps=8)

    def __init__(self, settings=None, gate=None):
        self.settings, self.gate = settings or Settings(), gate
        self.seen, self.used, self.intervals, self.resets, self.saved = [], [], [], [], []
        self.closed, self.problems, self.relative_actions, self.leftovers = False, [], False, []

    def unit_problem(self, state, names, declared):
        return ''

    def infer(self, observation, leftover=None):
        self.seen.append(observation)
        self.leftovers.append(leftover)
        self.used.append(self.settings)
        other = self.gate(self) if self.gate else None
        steps = 0.01 * np.arange(1, 17, dtype=np.float32)[:, None]
        actions = observation.state + steps if other is None else other
        report = CallReport(milliseconds={'total': 1.0, 'act': 1.0}, guided=leftover is not None)
        return ActionChunk(actions, report, observation.stamp_s)

    def chunk_published(self, next_call_in_s):
        self.intervals.append(next_call_in_s)

    def warm_up(self, prompt):
        pass

    def reset_episode(self, prompt):
        self.resets.append(prompt)

    def wait_ready(self, timeout_s):
        return True

    def save_episode(self, success=True):
        self.saved.append(success)
        return f'episode-{len(self.saved)}'

    def status(self):
        return {'library_entries': 3, 'slots_ready': 1, 'slots': 2, 'working_set_bytes': 10, 'library_bytes': 20,
                'served_library': 0, 'served_previous_call': 0, 'served_dense': len(self.seen)}

    def close(self):
        self.closed = True


class Bench:
    """PolicyNode under test, a robot node beside it, and both spun by the test thread.

    real: the node loads its policy from a checkpoint, instead of taking ``policy``.
    """

    def __init__(self, policy=None, namespace=None, real=False, **parameters):
        self.policy = policy or EchoPolicy()
        self.namespace = namespace or f'/bench{next(NUMBER)}'
        values = {'checkpoint': 'some/checkpoint', 'prompt': 'lift', 'joint_names': list(ARM7),
                  'cameras': ['base', 'wrist'], 'control_rate_hz': 20.0, 'blend_s': 0.0, **parameters}
        overrides = [Parameter(name, value=value) for name, value in values.items() if value is not None]
        self.loaded, self.fed = [], [c for c in values['cameras'] or () if c not in values.get('masked_cameras', ())]
        loaders = {} if real else {'config_loader': self._config, 'policy_factory': self._make}
        self.node = PolicyNode(namespace=self.namespace, parameter_overrides=overrides, **loaders)
        self.robot = Node('robot', namespace=self.namespace)
        self.executor = SingleThreadedExecutor()
        self.executor.add_node(self.node)
        self.executor.add_node(self.robot)
        reliable = QoSProfile(depth=20, reliability=ReliabilityPolicy.RELIABLE)
        self.images = {c: self.robot.create_publisher(Image, f'{c}/image_raw', reliable) for c in ('base', 'wrist')}
        self.joints = self.robot.create_publisher(JointState, 'joint_states', reliable)
        self.clock = self.robot.create_publisher(Clock, '/clock', reliable)
        self.trajectories, self.chunks, self.statuses, self.rejected = [], [], [], []
        self.joint_names = named(values['joint_names'] or ())
        for kind, topic, seen in ((JointTrajectory, 'joint_trajectory', self._execute),
                                  (ActionChunkMessage, 'policy_node/action_chunk', self.chunks.append),
                                  (CacheStatus, 'policy_node/cache_status', self.statuses.append)):
            self.robot.create_subscription(kind, topic, seen, reliable)

    def _execute(self, message):
        """Receive a trajectory as a controller would. Its clock is the node's in simulated time, else any."""
        clock = self.node.get_clock()
        now_s = clock.now().nanoseconds * 1e-9 if clock.ros_time_is_active else None
        self.trajectories.append(message)
        self.rejected += [reason for reason in [rejection(message, self.joint_names, now_s)] if reason]

    def _config(self, checkpoint):
        return self.policy.config

    def _make(self, checkpoint, settings, library, device, cameras, joints):
        self.policy.settings = settings
        self.loaded.append(checkpoint)
        return self.policy

    def until(self, condition, what, timeout_s=10.0):
        """Spin until the condition holds."""
        end = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end, f'{what} did not happen within {timeout_s} s'
            self.executor.spin_once(timeout_sec=0.02)

    def fed_until(self, condition, what, timeout_s=10.0, period_s=0.05):
        """Spin until the condition holds, with a new observation every period: sending without a pause would keep the
        interpreter from the thread that computes."""
        due = 0.0

        def fed():
            nonlocal due
            if time.monotonic() >= due:
                self.send()
                due = time.monotonic() + period_s
            return condition()

        self.until(fed, what, timeout_s)

    def ask(self, kind, service, request):
        """Call a service and return the future."""
        client = self.robot.create_client(kind, service)
        self.until(client.service_is_ready, f'{service} ready')
        return client.call_async(request)

    def call(self, kind, service, request):
        """Call a service and return its response."""
        future = self.ask(kind, service, request)
        self.until(future.done, f'answer of {service}')
        return future.result()

    def change(self, transition):
        """Request a transition by name; returns whether it succeeded."""
        number = getattr(Transition, f'TRANSITION_{transition.upper()}')
        request = ChangeState.Request(transition=Transition(id=number))
        return self.call(ChangeState, 'policy_node/change_state', request).success

    def state(self):
        return self.call(GetState, 'policy_node/get_state', GetState.Request()).current_state.label

    def activate(self):
        assert self.change('configure'), self.node.last_error
        publishers = (*(p for c, p in self.images.items() if c in self.fed), self.joints)
        self.until(lambda: all(p.get_subscription_count() for p in publishers), 'discovery of inputs')
        self.until(lambda: self.robot.count_publishers('joint_trajectory') == 1, 'discovery of outputs')
        assert self.change('activate'), self.node.last_error

    def trigger(self, service):
        return self.call(Trigger, f'policy_node/{service}', Trigger.Request())

    def save(self, success):
        return self.call(SetBool, 'policy_node/save_episode', SetBool.Request(data=success))

    def set(self, atomically=False, **values):
        """Set parameters by service; returns the list of results (one if atomically)."""
        messages = [Parameter(name, value=value).to_parameter_msg() for name, value in values.items()]
        if atomically:
            request = SetParametersAtomically.Request(parameters=messages)
            return [self.call(SetParametersAtomically, 'policy_node/set_parameters_atomically', request).result]
        request = SetParameters.Request(parameters=messages)
        return self.call(SetParameters, 'policy_node/set_parameters', request).results

    def get(self, *names):
        return self.call(GetParameters, 'policy_node/get_parameters', GetParameters.Request(names=list(names))).values

    def now_ns(self):
        return self.robot.get_clock().now().nanoseconds

    def send_image(self, camera, stamp_ns, level=1):
        image = sentinel(level)
        stamp_message(image, stamp_ns)
        self.images[camera].publish(image)

    def send_joints(self, stamp_ns, positions, names=ARM7):
        message = JointState(name=list(names), position=[float(p) for p in positions])
        stamp_message(message, stamp_ns)
        self.joints.publish(message)

    def send(self, stamp_ns=None, positions=(0.0,) * 7):
        """One complete observation."""
        stamp_ns = self.now_ns() if stamp_ns is None else stamp_ns
        self.send_image('base', stamp_ns, 1)
        self.send_image('wrist', stamp_ns, 2)
        self.send_joints(stamp_ns, positions)

    def send_time(self, now_ns):
        self.clock.publish(Clock(clock=stamp_message(Image(), now_ns).header.stamp))
        self.until(lambda: self.node.get_clock().now().nanoseconds == now_ns, 'arrival of /clock')

    def close(self):
        self.node.close()
        self.executor.shutdown()
        self.node.destroy_node()
        self.robot.destroy_node()


def sentinel(level):
    """Image of one colour: (10, 20, 30) * level in RGB."""
    pixels = np.tile(np.array([10, 20, 30], np.uint8) * level, (8, 8, 1))
    image = Image(height=8, width=8, encoding='rgb8', step=24)
    image.data = array.array('B', pixels.tobytes())
    return image


def stamp_message(message, stamp_ns):
    message.header.stamp.sec, message.header.stamp.nanosec = divmod(stamp_ns, 1_000_000_000)
    return message
