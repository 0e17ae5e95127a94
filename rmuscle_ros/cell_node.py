# SPDX-License-Identifier: Apache-2.0
"""The simulated work cell as a robot: cameras and joint states out, trajectories in, a clock that waits for the
policy.

One episode, as the policy node sees it:

1. The cell resets itself by the seed and asks the policy node for ``~/reset_episode``; nothing is published before
the answer.
2. It publishes one observation (three images, joint states, one stamp) and stops the clock. Until a trajectory comes
it repeats the same observation now and then, in case one was lost.
3. It executes the trajectory's points, each in its control period, then goes to 2, until the cube is handed over or
max_steps are done. The result goes to ``~/episode_result`` and to whoever asked.

So the policy sees the same observations on any machine, however slow: equal seeds give equal motion. What the
machine's speed does change is the gap in which the arms stand still, which is measured in wall time (the policy
latency).
"""

from __future__ import annotations

import array
import json
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future as Work
from typing import Any

import numpy as np
from rcl_interfaces.msg import FloatingPointRange, IntegerRange, ParameterDescriptor
from rclpy.callback_groups import ReentrantCallbackGroup
from rclpy.node import Node
from rclpy.parameter import Parameter
from rclpy.qos import QoSProfile, ReliabilityPolicy
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import Image, JointState
from std_msgs.msg import String
from std_srvs.srv import Trigger
from trajectory_msgs.msg import JointTrajectory

from rmuscle_core.errors import RMuscleError
from rmuscle_ros.player import Pace, TrajectoryPlayer
from rmuscle_ros.publish import time_message
from rmuscle_ros.spin import finished, run

REPEAT_S = 0.2  # wall time after which an unanswered observation is published again
BETWEEN_EPISODES_NS = 10_000_000_000  # simulated; longer than any chunk, so that none reaches into the next episode
RELIABLE = {'reliability': ReliabilityPolicy.RELIABLE}


def make_cell(pixels: int) -> Any:
    """Build the simulated cell; needs the extra ``workcell``."""
    from rmuscle_core.workcell.cell import WorkCell
    return WorkCell(pixels=pixels)


class CellNode(Node):
    """Runs the cell on a thread of its own, ``simulation``; callbacks only hand things over.

    Parameters: seed (of the next ~/run_episode), seeds (episodes to run on start), max_steps, real_time_factor, pixels,
    stream_images, policy_node, patience_s.
    """

    def __init__(self, name: str = 'cell_node', **kwargs: Any):
        super().__init__(name, **kwargs)
        self._declare()
        self.fatal = False
        self._closing = threading.Event()
        self._requests: queue.Queue[tuple[int, Work] | None] = queue.Queue()
        self._sim_ns = BETWEEN_EPISODES_NS
        self._clock_publisher = self.create_publisher(Clock, '/clock', QoSProfile(depth=1, **RELIABLE))
        self._joints_publisher = self.create_publisher(JointState, 'joint_states', QoSProfile(depth=5, **RELIABLE))
        self._result_publisher = self.create_publisher(String, '~/episode_result', QoSProfile(depth=10, **RELIABLE))
        self._connect()
        self._reset_policy = self.create_client(Trigger, f'{self._value("policy_node")}/reset_episode')
        # A callback that awaits keeps its group busy, so this one may not be in the node's default group.
        self.create_service(Trigger, '~/run_episode', self._on_run, callback_group=ReentrantCallbackGroup())
        for seed in self._value('seeds') or ():
            self._requests.put((seed, Work()))
        self._thread = threading.Thread(target=self._simulate, name='simulation', daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the episode and the simulation thread."""
        self._closing.set()
        self._requests.put(None)
        self._thread.join(5.0)

    def _declare(self) -> None:
        def declare(name: str, value: Any, text: str, low: float | None = None, high: float | None = None) -> None:
            described = ParameterDescriptor(description=text)
            if isinstance(value, float):
                described.floating_point_range = [FloatingPointRange(from_value=low, to_value=high)]
            elif low is not None:
                described.integer_range = [IntegerRange(from_value=low, to_value=high, step=1)]
            self.declare_parameter(name, value, described)

        declare('seed', 0, 'cube pose and light of the next ~/run_episode', 0, 2**31 - 1)
        self.declare_parameter('seeds', Parameter.Type.INTEGER_ARRAY,
                               ParameterDescriptor(description='seeds of the episodes run at start'))
        declare('max_steps', 150, 'control steps after which an episode has failed', 1, 100_000)
        declare('real_time_factor', 1.0, 'simulated per real second while the arms move; 0 is as fast as possible', 0.0,
                1000.0)
        declare('pixels', 64, 'side of the camera images', 8, 1024)
        declare('stream_images', False, 'publish images in every control step, not only when the policy is due')
        declare('policy_node', 'policy_node', 'name of the policy node')
        declare('patience_s', 120.0, 'wall seconds to wait for the policy node before an episode is given up', 0.1, 1e6)

    def _connect(self) -> None:
        try:
            from rmuscle_core.workcell.cell import CAMERAS, CONTROL_RATE, JOINTS
        except ImportError as error:
            raise RMuscleError(f'the simulated cell cannot be imported ({error}); pip install "rmuscle[workcell]"'
                               ) from error
        self._joints, self._period_ns = JOINTS, round(1e9 / CONTROL_RATE)
        self._player = TrajectoryPlayer(JOINTS, self._period_ns)
        qos = QoSProfile(depth=1, **RELIABLE)
        self._images = {camera: self.create_publisher(Image, f'{camera}/image_raw', qos) for camera in CAMERAS}
        self.create_subscription(JointTrajectory, 'joint_trajectory', self._on_trajectory, qos)

    def _value(self, name: str) -> Any:
        return self.get_parameter_or(name).value

    # Executor thread ---

    def _on_trajectory(self, message: JointTrajectory) -> None:
        try:
            self._player.accept(message)
        except RMuscleError as error:
            self.get_logger().error(str(error))

    async def _on_run(self, _request: Any, response: Any) -> Any:
        work: Work = Work()
        self._requests.put((self._value('seed'), work))
        try:
            result = await finished(self.executor, work)
            response.success, response.message = result['success'], json.dumps(result)
        except Exception as error:  # noqa: BLE001 - an exception would end the executor
            response.success, response.message = False, str(error)
        return response

    # Simulation thread ---

    def _simulate(self) -> None:
        try:
            self._cell = make_cell(self._value('pixels'))  # here, because a renderer belongs to its thread
            while not self._closing.is_set():
                self._publish_time()
                try:
                    request = self._requests.get(timeout=REPEAT_S)
                except queue.Empty:
                    continue
                if request is not None:
                    self._serve(*request)
            self._cell.close()
        except Exception as error:  # noqa: BLE001 - the thread's last word
            self.get_logger().fatal(f'the simulation ended: {type(error).__name__}: {error}')
            self.fatal = True

    def _serve(self, seed: int, work: Work) -> None:
        try:
            result = self._episode(seed)
        except RMuscleError as error:
            self.get_logger().error(str(error))
            work.set_exception(error)
            return
        self.get_logger().info(f'episode with seed {seed}: {"success" if result["success"] else "failure"} after '
                               f'{result["steps"]} steps, {result["calls"]} policy calls')
        self._result_publisher.publish(String(data=json.dumps(result)))
        work.set_result(result)

    def _episode(self, seed: int) -> dict[str, Any]:
        """Run one episode. Raises RMuscleError if the policy node does not answer or the node is closed."""
        self._sim_ns += BETWEEN_EPISODES_NS
        self._cell.reset(seed)
        self._player.begin_episode(self._sim_ns)
        self._publish_time()
        self._await('the policy node to begin an episode', self._policy_is_reset)
        pace, gaps_ms, render_ms = Pace(self._period_ns / 1e9, self._value('real_time_factor')), [], []
        step, success, reward = 0, False, 0
        moved_at = time.monotonic()
        while step < self._value('max_steps') and not success:
            command = self._player.command(self._sim_ns + self._period_ns)
            if command is None:
                render_ms.append(self._publish_observation())
                self._await('a trajectory', self._trajectory_came)
                gaps_ms.append(1e3 * (time.monotonic() - moved_at))
                pace.restart()
                continue
            success = self._cell.step(command)
            reward, step = max(reward, int(self._cell.reward)), step + 1
            self._sim_ns += self._period_ns
            self._publish_time()
            self._publish_joints()
            if self._value('stream_images'):
                self._publish_images()
            pace.wait()
            moved_at = time.monotonic()
        return {'seed': seed, 'success': success, 'reward': reward, 'steps': step, 'calls': len(gaps_ms),
                'first_gap_ms': gaps_ms[0], 'gaps_ms': gaps_ms[1:], 'render_ms': render_ms}

    def _await(self, what: str, come: Callable[[], bool]) -> None:
        """Call ``come``, which waits up to REPEAT_S, until it says True."""
        patience_s = self._value('patience_s')
        end = time.monotonic() + patience_s
        while not come():
            if self._closing.is_set():
                raise RMuscleError('the cell is being shut down')
            if time.monotonic() > end:
                raise RMuscleError(f'waited {patience_s:g} s for {what}; is {self._value("policy_node")} active?')

    def _policy_is_reset(self) -> bool:
        if not self._reset_policy.wait_for_service(REPEAT_S):
            return False
        answered = threading.Event()
        future = self._reset_policy.call_async(Trigger.Request())
        future.add_done_callback(lambda _: answered.set())
        end = time.monotonic() + self._value('patience_s')
        while not answered.wait(REPEAT_S):
            if self._closing.is_set() or time.monotonic() > end:  # one that was killed never answers
                return False
        if not future.result().success:
            time.sleep(REPEAT_S)  # not configured yet
        return future.result().success

    def _trajectory_came(self) -> bool:
        if self._player.wait(self._sim_ns, REPEAT_S):
            return True
        self._publish_time()
        self._publish_joints()
        for message in self._last_images:
            self._images[message.header.frame_id].publish(message)
        return False

    def _publish_time(self) -> None:
        self._clock_publisher.publish(Clock(clock=time_message(self._sim_ns)))

    def _publish_joints(self) -> None:
        message = JointState(name=list(self._joints), position=self._cell.state().astype(float).tolist())
        message.header.stamp = time_message(self._sim_ns)
        self._joints_publisher.publish(message)

    def _publish_observation(self) -> float:
        self._publish_joints()
        return self._publish_images()

    def _publish_images(self) -> float:
        """Render and publish; returns the milliseconds of rendering, which are the simulator's, not the policy's."""
        since = time.monotonic()
        images = self._cell.images()
        render_ms = 1e3 * (time.monotonic() - since)
        self._last_images = [image_message(camera, pixels, self._sim_ns) for camera, pixels in images.items()]
        for message in self._last_images:
            self._images[message.header.frame_id].publish(message)
        return render_ms


def image_message(camera: str, pixels: np.ndarray, stamp_ns: int) -> Image:
    """uint8 [h, w, 3] RGB as an Image whose frame is named after the camera."""
    message = Image(height=pixels.shape[0], width=pixels.shape[1], encoding='rgb8', step=3 * pixels.shape[1])
    message.header.stamp, message.header.frame_id = time_message(stamp_ns), camera
    message.data = array.array('B', np.ascontiguousarray(pixels).tobytes())
    return message


def main(args: list[str] | None = None) -> int:
    """Entry point of the executable cell_node."""
    return run(CellNode, args)
