# SPDX-License-Identifier: Apache-2.0
"""The world around the node: a clock, a robot, cameras, and the services of the node."""

from __future__ import annotations

import array
import contextlib
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import rclpy
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState, GetState
from process import NodeProcess
from rclpy.executors import ExternalShutdownException, SingleThreadedExecutor
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from robot import JOINTS, Robot
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import Image, JointState
from std_msgs.msg import String
from trajectory_msgs.msg import JointTrajectory

RATE_HZ = 12.5
PERIOD_NS = round(1e9 / RATE_HZ)
CAMERAS, PIXELS = ('top', 'left_wrist', 'right_wrist'), 64
PATIENCE_S, REPEAT_S = 1.5, 0.25  # wall: how long the clock stands for an answer, after which a picture is sent again
AGAIN = 40  # ticks, after which it stands again: the first answer may have come too late
ANSWER_S = 90.0  # wall: within which a service must answer on a loaded machine
EXCUSE_S = 2.0  # wall: how long after the clock was set, or the node was held up, its clock may be another
RELIABLE = QoSProfile(depth=50, reliability=ReliabilityPolicy.RELIABLE)
LATCHED = QoSProfile(depth=1, reliability=ReliabilityPolicy.RELIABLE, durability=DurabilityPolicy.TRANSIENT_LOCAL)


class Violated(Exception):
    """The soak cannot go on as planned; the text says what did not hold."""


class World:
    """Turns by ``tick``: one control period of simulated time. Faults change ``silent``, ``picture`` and ``joints``.

    silent: sources that send nothing. picture(camera, message), joints(message): what is sent instead.
    """

    def __init__(self, process: NodeProcess, library: Path, seed: int, factor: float) -> None:
        self.process, self.library, self.rng = process, library, random.Random(seed)
        self.node = Node('robot', namespace='/soak')
        self.robot = Robot(RATE_HZ, seed)
        self.now_ns, self.simulated_ns, self._ticks = 10**12, 0, 0
        self.silent: set[str] = set()
        self.picture: Callable[[str, Image], Image] = lambda camera, message: message
        self.joints: Callable[[JointState], JointState] = lambda message: message
        self.order = list(range(len(JOINTS)))
        self.saved: set[Path] = set()  # episodes that were reported written
        self.damaged: set[Path] = set()  # those of them that a fault damaged
        self.violations: list[str] = []
        self.fault = 'none'
        self.excused_until = 0.0
        self.expected_end = False  # of the process
        self._factor, self._patience_s, self._waited = factor, PATIENCE_S, False
        self._next_tick = time.monotonic()
        self._came: queue.Queue = queue.Queue()
        self._scenery = {camera: np.random.default_rng(i).integers(0, 255, (PIXELS, PIXELS, 3), np.uint8)
                         for i, camera in enumerate(CAMERAS)}
        self._connect()

    def _connect(self) -> None:
        node = self.node
        self.clock = node.create_publisher(Clock, '/clock', RELIABLE)
        self.prompt = node.create_publisher(String, 'prompt', LATCHED)
        self.joint_publishers = [node.create_publisher(JointState, 'joint_states', RELIABLE)]
        self._images = {c: node.create_publisher(Image, f'{c}/image_raw', RELIABLE) for c in CAMERAS}
        self._clients: dict[str, Any] = {}
        node.create_subscription(JointTrajectory, 'joint_trajectory', self._came.put, RELIABLE)
        self._executor = SingleThreadedExecutor()
        self._executor.add_node(node)
        self._spinning = threading.Thread(target=self._spin)
        self._spinning.start()

    def _spin(self) -> None:
        with contextlib.suppress(ExternalShutdownException):
            self._executor.spin()

    @property
    def now_s(self) -> float:
        return self.now_ns / 1e9

    def violated(self, text: str) -> None:
        """Note what did not hold."""
        self.violations.append(f'{self.simulated_ns / 1e9:.1f} s, {self.fault}: {text}')
        print('VIOLATION', self.violations[-1], flush=True)

    # Time ---

    def tick(self) -> None:
        """One control period: the clock, the robot, what it and its cameras send, and what has come."""
        self.now_ns += PERIOD_NS
        self.simulated_ns += PERIOD_NS
        self._ticks += 1
        self.publish_clock()
        self.robot.move(self.now_s)
        self._receive()
        idle = self.robot.idle(self.now_s)
        self.publish(pictures=idle or self._ticks % 3 == 0)
        self._objections()
        if self.process.ended and not self.expected_end:
            self.expected_end = True
            raise Violated(f'the node ended by itself with code {self.process.code(1.0)}')
        if idle and (not self._waited or self._ticks % AGAIN == 0):
            self._await()
        self._next_tick = max(self._next_tick + PERIOD_NS / 1e9 / self._factor, time.monotonic() - 0.05)
        time.sleep(max(0.0, self._next_tick - time.monotonic()))

    def advance(self, seconds: float) -> None:
        """Let simulated time pass."""
        until = self.simulated_ns + round(seconds * 1e9)
        while self.simulated_ns < until:
            self.tick()

    def until(self, condition: Callable[[], bool], wall_s: float) -> bool:
        """Let time pass until the condition holds; False when it does not within so much wall time."""
        end = time.monotonic() + wall_s
        while not condition():
            if time.monotonic() > end:
                return False
            self.tick()
        return True

    def set_clock(self, seconds: float) -> None:
        """Move the clock under the node and the robot."""
        self.now_ns += round(seconds * 1e9)
        self.robot.clock_set(self.now_s if seconds > 0 else None)
        self.excuse()

    def excuse(self) -> None:
        """From now on, for a moment, the node cannot know the time."""
        self.excused_until = time.monotonic() + EXCUSE_S

    @contextlib.contextmanager
    def no_answer_expected(self) -> Iterator[None]:
        """The clock does not stand still for an answer meanwhile."""
        self._patience_s = 0.0
        try:
            yield
        finally:
            self._patience_s, self._waited = PATIENCE_S, False

    def _await(self) -> None:
        """The robot is at rest: the clock stands for a while until a trajectory comes."""
        end, self._waited = time.monotonic() + self._patience_s, True
        while self._came.empty() and time.monotonic() < end:
            time.sleep(0.01)
            if time.monotonic() % REPEAT_S < 0.01:
                self.publish(pictures=True)
        self._receive()
        self._next_tick = time.monotonic()

    def _receive(self) -> None:
        while not self._came.empty():
            before = self.robot.accepted
            self.robot.receive(self._came.get(), self.now_s, time.monotonic() < self.excused_until)
            self._waited = self._waited and self.robot.accepted == before

    def _objections(self) -> None:
        for objection in self.robot.objections:
            self.violated(objection)
        self.robot.objections.clear()

    # What the robot sends ---

    def stamp(self, message: Any, ahead_s: float = 0.0) -> Any:
        message.header.stamp.sec, message.header.stamp.nanosec = divmod(self.now_ns + round(ahead_s * 1e9), 10**9)
        return message

    def publish_clock(self) -> None:
        message = Clock()
        message.clock.sec, message.clock.nanosec = divmod(self.now_ns, 10**9)
        self.clock.publish(message)

    def publish(self, pictures: bool) -> None:
        """Joint states, shared out over the publishers there are, and pictures."""
        measured = self.robot.measured()
        for i, publisher in enumerate(self.joint_publishers if 'joints' not in self.silent else ()):
            part = self.order[i::len(self.joint_publishers)]
            publisher.publish(self.joints(self.stamp(JointState(
                name=[JOINTS[j] for j in part], position=[float(measured[j]) for j in part]))))
        for camera in CAMERAS if pictures else ():
            if camera not in self.silent:
                self._images[camera].publish(self.picture(camera, self.view(camera)))

    def view(self, camera: str) -> Image:
        """What a camera sees: its scenery, and a patch where the arm is."""
        pixels = self._scenery[camera].copy()
        row, column = (int((PIXELS - 16) * (0.5 + self.robot.positions[j] / 4)) for j in (1, 2))
        pixels[max(0, row):row + 16, max(0, column):column + 16] = 200
        message = Image(height=PIXELS, width=PIXELS, encoding='rgb8', step=3 * PIXELS)
        message.data = array.array('B', pixels.tobytes())
        return self.stamp(message)

    # The node ---

    def ask(self, kind: type, service: str, request: Any) -> Any:
        """Call a service of the node; returns the future."""
        if service not in self._clients:
            self._clients[service] = self.node.create_client(kind, f'policy_node/{service}')
        if not self.until(self._clients[service].service_is_ready, ANSWER_S):
            raise Violated(f'the service {service} did not appear within {ANSWER_S:g} s')
        return self._clients[service].call_async(request)

    def answer(self, future: Any, service: str) -> Any:
        """Let time pass until the answer is there."""
        if not self.until(future.done, ANSWER_S):
            raise Violated(f'{service} did not answer within {ANSWER_S:g} s')
        return future.result()

    def call(self, kind: type, service: str, request: Any) -> Any:
        return self.answer(self.ask(kind, service, request), service)

    def change(self, transition: str) -> bool:
        """Ask for a transition by its name."""
        number = getattr(Transition, f'TRANSITION_{transition.upper()}')
        request = ChangeState.Request(transition=Transition(id=number))
        with self.no_answer_expected():
            return self.call(ChangeState, 'change_state', request).success

    def bring_up(self) -> None:
        """Configure and activate."""
        for transition in ('configure', 'activate'):
            if not self.change(transition):
                raise Violated(f'{transition} failed; see {self.process.log}')

    def start_node(self) -> None:
        """A new life, up to active."""
        self.process.start()
        self.expected_end = False
        self.excuse()
        with self.no_answer_expected():  # a request to the process of before would never be answered
            while not self.until(self.ask(GetState, 'get_state', GetState.Request()).done, 3.0):
                pass
        self.bring_up()

    def end_node(self, number: int, timeout_s: float) -> int | None:
        """End the process by a signal; time passes meanwhile. Returns its exit code, None if it had to be killed."""
        self.expected_end = True
        self.process.signal(number)
        with self.no_answer_expected():
            self.until(lambda: self.process.ended, timeout_s)
        return self.process.code(0.1)

    def close(self) -> None:
        rclpy.shutdown()
        self._spinning.join()
