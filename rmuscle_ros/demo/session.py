# SPDX-License-Identifier: Apache-2.0
"""The demo's view of the running nodes: starts them, asks their services, keeps what they publish."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from ament_index_python.packages import get_package_prefix
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState
from rcl_interfaces.srv import SetParameters
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.parameter import Parameter
from rclpy.qos import QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import Image, JointState
from std_srvs.srv import SetBool, Trigger

from rmuscle.msg import ActionChunk, CacheStatus
from rmuscle_core.errors import RMuscleError
from rmuscle_core.observation import Observation
from rmuscle_core.sensing.image import decode_image

START_S, EPISODE_S = 120.0, 180.0


@dataclass
class Call:
    """One policy call as the robot saw it."""

    observation: Observation
    actions: np.ndarray  # float32 [H, A] as published
    status: CacheStatus


@dataclass
class Run:
    """One episode: the cell's own account and the calls of the policy."""

    result: dict[str, Any]
    calls: list[Call] = field(default_factory=list)

    @property
    def success(self) -> bool:
        return bool(self.result['success'])


class Session:
    """Runs cell_node and policy_node as processes of their own; use as a context manager."""

    def __init__(self, node: Node, prompt: str, joints: Sequence[str], cameras: Sequence[str], out: Path) -> None:
        self._node, self._prompt, self._joints, self._cameras, self._out = node, prompt, joints, cameras, out
        self._executor = SingleThreadedExecutor()
        self._executor.add_node(node)
        self._processes: list[subprocess.Popen] = []
        self._seen: dict[int, dict[str, Any]] = {}  # stamp -> images and joints of the running episode
        self._chunks: dict[int, ActionChunk] = {}
        self._status: dict[int, CacheStatus] = {}
        reliable = QoSProfile(depth=20, reliability=ReliabilityPolicy.RELIABLE)
        for camera in cameras:
            node.create_subscription(Image, f'{camera}/image_raw',
                                     lambda m, c=camera: self._keep(m, c, decode_image(m, c)), reliable)
        node.create_subscription(JointState, 'joint_states', lambda m: self._keep(m, 'joints', m), reliable)
        node.create_subscription(ActionChunk, 'policy_node/action_chunk', lambda m: self._chunks.update({m.call: m}),
                                 reliable)
        node.create_subscription(CacheStatus, 'policy_node/cache_status', lambda m: self._status.update({m.call: m}),
                                 reliable)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
        self._executor.shutdown()

    def start(self, executable: str, *arguments: str) -> None:
        """Start an executable of this package; its output goes to a log file in the demo's folder."""
        path = Path(get_package_prefix('rmuscle')) / 'lib' / 'rmuscle' / executable
        with (self._out / f'{executable}.log').open('w') as log:
            self._processes.append(subprocess.Popen([sys.executable, str(path), '--ros-args', *arguments], stdout=log,
                                                    stderr=subprocess.STDOUT))

    def activate(self) -> None:
        """Bring the policy node to active: configure loads the weights and expands first references."""
        for transition in (Transition.TRANSITION_CONFIGURE, Transition.TRANSITION_ACTIVATE):
            request = ChangeState.Request(transition=Transition(id=transition))
            if not self._ask(ChangeState, 'policy_node/change_state', request, START_S).success:
                raise RMuscleError(f'policy_node refused a transition; its log {self._out}/policy_node.log says why')

    def set(self, node: str, **values: Any) -> None:
        """Set parameters of a node as ``ros2 param set`` does."""
        request = SetParameters.Request(
            parameters=[Parameter(name, value=value).to_parameter_msg() for name, value in values.items()])
        for result in self._ask(SetParameters, f'{node}/set_parameters', request, START_S).results:
            if not result.successful:
                raise RMuscleError(f'{node} refused {values}: {result.reason}')

    def run_episode(self, seed: int) -> Run:
        """Run the cell's episode of this seed and return what was seen of it."""
        self._seen.clear()
        known = set(self._status)
        self.set('cell_node', seed=seed)
        answer = self._ask(Trigger, 'cell_node/run_episode', Trigger.Request(), EPISODE_S)
        if not answer.message.startswith('{'):
            raise RMuscleError(f'the episode with seed {seed} could not be run: {answer.message}')
        result = json.loads(answer.message)
        arrived = self._spin_until(lambda: len(self._complete() - known) >= result['calls'], 5.0)
        if not arrived:
            raise RMuscleError(f'of {result["calls"]} policy calls with seed {seed} only '
                               f'{len(self._complete() - known)} were seen on the topics; the machine may be too '
                               'busy, so try again')
        return Run(result, [self._call(number) for number in sorted(self._complete() - known)])

    def save_episode(self) -> None:
        """Have the policy node write the episode that just ended to its library."""
        answer = self._ask(SetBool, 'policy_node/save_episode', SetBool.Request(data=True), EPISODE_S)
        if not answer.success:
            raise RMuscleError(f'the episode could not be saved: {answer.message}')

    def _keep(self, message: Any, key: str, value: Any) -> None:
        self._seen.setdefault(_stamp(message), {})[key] = value

    def _complete(self) -> set[int]:
        """Numbers of the calls whose chunk, status and observation have all arrived."""
        keys = {*self._cameras, 'joints'}
        return {n for n, chunk in self._chunks.items()
                if n in self._status and keys <= set(self._seen.get(_stamp(chunk), ()))}

    def _call(self, number: int) -> Call:
        chunk = self._chunks[number]
        seen = self._seen[_stamp(chunk)]
        position = dict(zip(seen['joints'].name, seen['joints'].position, strict=True))
        state = np.array([position[joint] for joint in self._joints], np.float32)
        observation = Observation({c: seen[c] for c in self._cameras}, state, self._prompt)
        return Call(observation, np.array(chunk.actions, np.float32).reshape(chunk.horizon, -1), self._status[number])

    def _ask(self, kind: type, name: str, request: Any, timeout_s: float) -> Any:
        client = self._node.create_client(kind, name)
        try:
            if not self._spin_until(client.service_is_ready, START_S):
                raise RMuscleError(f'the service {name} did not appear in {START_S:g} s; see the logs in {self._out}')
            future = client.call_async(request)
            if not self._spin_until(future.done, timeout_s):
                raise RMuscleError(f'{name} did not answer within {timeout_s:g} s; see the logs in {self._out}')
            return future.result()
        finally:
            self._node.destroy_client(client)

    def _spin_until(self, done: Any, timeout_s: float) -> bool:
        """Serve callbacks until ``done()``; False when time is up or a node's process has ended."""
        clock = self._node.get_clock()
        end = clock.now().nanoseconds + round(timeout_s * 1e9)
        while not done():
            if clock.now().nanoseconds > end or any(p.poll() is not None for p in self._processes):
                return False
            self._executor.spin_once(timeout_sec=0.1)
        return True


def _stamp(message: Any) -> int:
    return message.header.stamp.sec * 10**9 + message.header.stamp.nanosec
