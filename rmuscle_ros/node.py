# SPDX-License-Identifier: Apache-2.0
"""The policy node: cameras and joint states in, action-chunk trajectories out. Wiring only; the work is done
elsewhere.

Threads: callbacks run on the executor's, policy calls on ``inference``. Callbacks never wait for the policy, except
that configure loads the weights inside its transition.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from concurrent.futures import Future as Work
from typing import Any

from diagnostic_msgs.msg import DiagnosticArray
from rclpy.callback_groups import ReentrantCallbackGroup
from rclpy.clock import Clock, ClockType
from rclpy.event_handler import SubscriptionEventCallbacks
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy, qos_policy_name_from_kind
from rclpy.qos_overriding_options import QoSOverridingOptions
from sensor_msgs.msg import CompressedImage, Image, JointState
from std_msgs.msg import String
from std_srvs.srv import SetBool, Trigger
from trajectory_msgs.msg import JointTrajectory

from rmuscle.msg import ActionChunk as ActionChunkMessage
from rmuscle.msg import CacheStatus
from rmuscle_core.errors import ObservationError, RMuscleError
from rmuscle_core.observation import ActionChunk
from rmuscle_ros.checkpoint import load_config, load_policy
from rmuscle_ros.clock import NodeClock
from rmuscle_ros.contract import Contract, check_contract, required
from rmuscle_ros.diagnostics import ERROR, OK, InputDiagnostics, cache_entry, diagnostic_array, entry, policy_entry
from rmuscle_ros.lifecycle import RetryableLifecycleNode, transition
from rmuscle_ros.observe import ObservationBuffer, Snapshot
from rmuscle_ros.params import NodeParameters
from rmuscle_ros.publish import ChunkPublisher
from rmuscle_ros.spin import finished, run
from rmuscle_ros.worker import InferenceWorker

WATCHDOG_S, DIAGNOSTICS_S, JOIN_S = 0.1, 1.0, 2.0
FAILURES_TO_STOP = 3  # policy calls in a row without a usable answer


class PolicyNode(RetryableLifecycleNode):
    """In: joint_states, prompt and one image topic per camera. Out: joint_trajectory, ~/action_chunk, ~/cache_status
    and /diagnostics. Services: ~/start, ~/stop, ~/reset_episode and ~/save_episode (true for a success).

    config_loader and policy_factory have the signatures of ``load_config`` and ``load_policy``.
    """

    def __init__(self, name: str = 'policy_node', config_loader: Callable[..., Any] = load_config,
                 policy_factory: Callable[..., Any] = load_policy, **kwargs: Any):
        super().__init__(name, **kwargs)
        self._load_config, self._make_policy = config_loader, policy_factory
        self._policy: Any = None
        self._worker: InferenceWorker | None = None
        self._entities: list[tuple[Callable, Any]] = []  # (how to destroy it, entity), made by configure
        self._said = ''  # prompt from the topic
        self._waiting_for, self._give_up, self._stalled = '', '', False
        self._failures = 0
        self.fatal = False
        self._params = NodeParameters(self, lambda: self._policy is not None, self._parameters_changed)
        self._time = NodeClock(self, self._moved_back)
        self._diagnostics = self.create_publisher(DiagnosticArray, '/diagnostics', 10)
        steady = Clock(clock_type=ClockType.STEADY_TIME)  # fire without /clock, and however the system time is set
        self.create_timer(WATCHDOG_S, self.guarded(self._watch), clock=steady)
        self.create_timer(DIAGNOSTICS_S, self.guarded(self._publish_diagnostics), clock=steady)
        self.create_service(Trigger, '~/start', self.guarded(self._on_start))
        self.create_service(Trigger, '~/stop', self.guarded(self._on_stop))
        # A callback that awaits keeps its group busy; in the default group it would hold up every other callback.
        waiting = ReentrantCallbackGroup()
        self.create_service(Trigger, '~/reset_episode', self._on_reset, callback_group=waiting)
        self.create_service(SetBool, '~/save_episode', self._on_save, callback_group=waiting)

    # Lifecycle ---

    @transition
    def on_configure(self, state: Any) -> None:
        options = self._params.node_settings
        self.get_logger().info(f'parameters: {self._params.changed_from_default()}')
        required(options)
        self._params.declare_topics()
        contract = check_contract(self._load_config(options.checkpoint), options)
        try:
            self._policy = self._make_policy(options.checkpoint, self._params.settings, options.library or None,
                                             options.device, contract.cameras)
            self._policy.execute_steps = contract.execute_steps
            self._policy.warm_up(options.prompt)
            self._connect(contract)
        except BaseException:
            self._release()
            raise
        self._log_mapping(contract)

    @transition
    def on_activate(self, state: Any) -> None:
        super().on_activate(state)
        self._give_up, self._failures = '', 0
        if self._params.node_settings.autostart_episode:
            self._begin_episode()
            self._start()

    @transition
    def on_deactivate(self, state: Any) -> None:
        self._stop()
        super().on_deactivate(state)

    @transition
    def on_cleanup(self, state: Any) -> None:
        self._release()

    @transition
    def on_shutdown(self, state: Any) -> None:
        self.close()

    def close(self) -> None:
        """Stop, hold and free everything from any state; the robot is told to hold before anything is torn down."""
        if self._worker is not None:
            self._stop()
        self._release()

    def _release(self) -> None:
        """Undo configure. Raises RMuscleError while a policy call does not return."""
        if self._worker is not None and not self._worker.close(JOIN_S):
            raise RMuscleError(f'a policy call has been running for {self._worker.call_age_s():.1f} s; try again '
                               'when it has returned')
        if self._policy is not None:
            self._policy.close()
        self._policy = self._worker = self._buffer = self._output = self._inputs = None
        for destroy, entity in self._entities:
            destroy(entity)
        self._entities.clear()
        gc.collect()
        torch = sys.modules.get('torch')
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    # Wiring ---

    def _connect(self, contract: Contract) -> None:
        options = self._params.node_settings
        topics = {camera: self._params.topic(camera) for camera in contract.cameras}
        self._buffer = ObservationBuffer(contract.joints, topics, options.max_age_s)
        self._inputs = InputDiagnostics(self._buffer, self.get_name())
        command = QoSProfile(depth=1, reliability=ReliabilityPolicy.RELIABLE)
        self._output = ChunkPublisher(self._publisher(JointTrajectory, 'joint_trajectory', command),
                                      self._publisher(ActionChunkMessage, '~/action_chunk', QoSProfile(depth=10)),
                                      self._publisher(CacheStatus, '~/cache_status', QoSProfile(depth=10)),
                                      contract.joints, options, contract.execute_steps)
        self._worker = InferenceWorker(self._policy, self._observe, self._deliver, self._failed)
        for camera, topic in topics.items():
            kind = CompressedImage if topic.endswith('/compressed') else Image
            self._subscribe(kind, topic, QoSProfile(depth=1, reliability=ReliabilityPolicy.BEST_EFFORT),
                            lambda message, camera=camera: self._on_image(camera, message))
        self._subscribe(JointState, 'joint_states', QoSProfile(depth=5, reliability=ReliabilityPolicy.BEST_EFFORT),
                        self._on_joints)
        latched = QoSProfile(depth=1, reliability=ReliabilityPolicy.RELIABLE,
                             durability=DurabilityPolicy.TRANSIENT_LOCAL)
        self._subscribe(String, 'prompt', latched, self._on_prompt)

    def _publisher(self, kind: type, topic: str, qos: QoSProfile) -> Any:
        publisher = self.create_lifecycle_publisher(kind, topic, qos,
                                                    qos_overriding_options=QoSOverridingOptions.with_default_policies())
        self._entities.append((self.destroy_lifecycle_publisher, publisher))
        return publisher

    def _subscribe(self, kind: type, topic: str, qos: QoSProfile, callback: Callable) -> None:
        def incompatible(event: Any) -> None:
            policy = qos_policy_name_from_kind(event.last_policy_kind)
            text = f'a publisher on {topic} offers another {policy} than asked for; see qos_overrides'
            self._inputs.qos[topic] = text
            self.get_logger().warning(text)

        events = SubscriptionEventCallbacks(incompatible_qos=self.guarded(incompatible))
        subscription = self.create_subscription(kind, topic, self.guarded(callback), qos, event_callbacks=events,
                                                qos_overriding_options=QoSOverridingOptions.with_default_policies())
        self._entities.append((self.destroy_subscription, subscription))

    def _log_mapping(self, contract: Contract) -> None:
        cameras = {camera: self._params.topic(camera) for camera in contract.cameras}
        self.get_logger().info(f'cameras: {cameras}; joints in order: {", ".join(contract.joints.names)}')
        if contract.ignored:
            self.get_logger().warning(f'the checkpoint has no camera {", ".join(contract.ignored)}: not subscribed')
        for problem in self._policy.problems:
            self.get_logger().warning(problem)

    # Executor thread ---

    def _on_image(self, camera: str, message: Any) -> None:
        self._buffer.add_image(camera, message, self._time.now_ns())
        self._worker.wake()

    def _on_joints(self, message: JointState) -> None:
        self._buffer.add_joint_state(message, self._time.now_ns())
        self._worker.wake()

    def _on_prompt(self, message: String) -> None:
        self._said = message.data

    def _parameters_changed(self) -> None:
        if self._policy is not None:
            self._policy.settings = self._params.settings
            self._buffer.max_age_ns = round(self._params.node_settings.max_age_s * 1e9)

    def _moved_back(self, reason: str) -> None:
        if self._worker is not None:
            self.get_logger().warning(f'{reason}: a new episode begins')
            self._begin_episode()

    def _begin_episode(self) -> Work:
        self._worker.abandon_call()  # before the buffer is cleared: nothing computed on its old samples may count
        self._buffer.clear()
        self._output.restart()
        return self._worker.reset(self._prompt())

    def _start(self) -> None:
        self._output.restart()
        self._worker.start()

    def _stop(self) -> None:
        """No further chunk, and the robot stays where it is: a hold is the last message."""
        self._worker.stop()
        if not self._output.commanding:
            return
        measured = self._buffer.measured(self._time.now_ns())
        if measured is None:
            self.get_logger().warning('joint_states are not fresh, so no hold was sent; the robot ends its last chunk')
        else:
            self._output.hold(measured)

    def _watch(self) -> None:
        if self._worker is None:
            return
        if self._give_up and self._worker.running:
            self.get_logger().error(f'stopped after {FAILURES_TO_STOP} failed calls in a row, last: {self._give_up}; '
                                    '~/start tries again')
            self._stop()
        age_s, limit_s = self._worker.call_age_s(), self._params.node_settings.stall_timeout_s
        if age_s > limit_s and not self._stalled:
            self._worker.abandon_call()
            self.get_logger().error(f'a policy call has been running for {age_s:.1f} s, stall_timeout_s is '
                                    f'{limit_s:.1f}; its answer will be dropped')
        self._stalled = age_s > limit_s

    def _publish_diagnostics(self) -> None:
        hardware = self.get_name()
        if self._policy is None:
            level = ERROR if self.last_error else OK
            entries = [entry('policy', level, self.last_error or self.state_label, {}, hardware)]
        else:
            state = 'running' if self._worker.running else self.state_label
            waiting = self._waiting_for if self._worker.running else ''
            stalled_s = self._worker.call_age_s() if self._stalled else 0.0
            counts = {'calls': self._worker.calls, 'calls_dropped': self._worker.discarded}
            entries = [*self._inputs.entries(self._time.now_ns(), self._params.node_settings.camera_rate_hz),
                       policy_entry(state, waiting, stalled_s, self._output, counts, self.last_error, hardware),
                       cache_entry(self._policy.status(), self._policy.problems, hardware)]
        self._diagnostics.publish(diagnostic_array(self.get_clock().now().to_msg(), entries))

    # Services ---

    def _on_start(self, _request: Any, response: Any) -> Any:
        response.success = self.state_label == 'active'
        response.message = 'started' if response.success else f'the node is {self.state_label}; activate it first'
        if response.success:
            self._give_up, self._failures = '', 0
            self._start()
        return response

    def _on_stop(self, _request: Any, response: Any) -> Any:
        response.success, response.message = True, 'stopped'
        if self._worker is not None:
            self._stop()
        return response

    async def _on_reset(self, _request: Any, response: Any) -> Any:
        return await self._answer(response, self._begin_episode, lambda _: 'a new episode begins')

    async def _on_save(self, request: Any, response: Any) -> Any:
        def save() -> Work:
            return self._worker.submit(lambda: self._policy.save_episode(request.data))

        return await self._answer(response, save, str)

    async def _answer(self, response: Any, begin: Callable[[], Work], describe: Callable[[Any], str]) -> Any:
        """Fill a service response from work on another thread, without keeping the executor waiting."""
        try:
            if self._worker is None:
                raise RMuscleError(f'the node is {self.state_label}; configure it first')
            result: Any = begin()
            while isinstance(result, Work):  # the inference thread may pass work on to the reconstruct thread
                result = await finished(self.executor, result)
            response.success, response.message = True, describe(result)
        except Exception as error:  # noqa: BLE001 - an exception would end the executor
            self.complain(error, 'service')
            response.success, response.message = False, self.last_error
        return response

    # Inference thread ---

    def _prompt(self) -> str:
        return self._said or self._params.node_settings.prompt

    def _observe(self, not_before_ns: int) -> Snapshot | None:
        now_ns, prompt = self._time.now_ns(), self._prompt()
        if not now_ns:
            self._waiting_for = 'no /clock message yet'
        elif not prompt:
            self._waiting_for = 'no prompt; set the parameter or publish one on the topic'
        else:
            self._waiting_for = self._buffer.problem(now_ns)
            self._asked = self._policy.settings  # what this call goes by, for its report
            return self._buffer.take(prompt, now_ns, not_before_ns)
        return None

    def _deliver(self, chunk: ActionChunk, snapshot: Snapshot) -> tuple[int, float]:
        now_ns = self._time.now_ns()
        end_ns = self._output.deliver(chunk, snapshot, now_ns, self._asked, self._policy.status())
        self._failures, self.last_error = 0, ''
        due_ns = end_ns - round(self._params.node_settings.call_lead_s * 1e9)
        return due_ns, max(0.0, (due_ns - now_ns) / 1e9)

    def _failed(self, error: Exception) -> None:
        self.complain(error, 'policy call')
        if isinstance(error, ObservationError) or getattr(error, 'kind', '') in ('expired', 'boundary'):
            return  # the next observation may do better
        self._failures += 1
        if self._failures >= FAILURES_TO_STOP:
            self._give_up = self.last_error
        # After a device error nothing on the device works any more; only a new process helps.
        text = str(error)
        if type(error).__name__ == 'AcceleratorError' or ('CUDA error' in text and 'out of memory' not in text):
            self.fatal = True


def main(args: list[str] | None = None) -> int:
    """Entry point of the executable policy_node."""
    return run(PolicyNode, args)
