# SPDX-License-Identifier: Apache-2.0
"""The policy node: cameras and joint states in, action-chunk trajectories out. Wiring only; the work is done
elsewhere.

Threads: callbacks run on the executor's, policy calls on ``inference``. Callbacks never wait for the policy, except
that configure loads the weights inside its transition.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future as Work
from typing import Any

from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from rclpy.clock import Clock, ClockType
from sensor_msgs.msg import CompressedImage, Image, JointState
from std_msgs.msg import String
from trajectory_msgs.msg import JointTrajectory

from rmuscle.msg import ActionChunk as ActionChunkMessage
from rmuscle.msg import CacheStatus, NodeStatus
from rmuscle_core.errors import ObservationError, RMuscleError
from rmuscle_core.observation import ActionChunk, Leftover
from rmuscle_core.sensing.observe import ObservationBuffer, Snapshot
from rmuscle_ros.bridge import other_encodings
from rmuscle_ros.checkpoint import load_config, load_policy
from rmuscle_ros.clock import NodeClock
from rmuscle_ros.contract import Contract, check_action_mode, check_contract, check_topics, required
from rmuscle_ros.device import DeviceDiagnostics
from rmuscle_ros.diagnostics import ERROR, OK, cache_entry, command_entry, diagnostic_array, entry, policy_entry
from rmuscle_ros.health import Health, status_message
from rmuscle_ros.inputs import InputDiagnostics
from rmuscle_ros.lifecycle import LOG_PERIOD_S, RetryableLifecycleNode, transition
from rmuscle_ros.params import NodeParameters
from rmuscle_ros.publish import ChunkPublisher
from rmuscle_ros.services import Services
from rmuscle_ros.spin import run
from rmuscle_ros.topics import COMMAND, IMAGE, JOINTS, PROMPT, REPORT, Topics
from rmuscle_ros.unit_check import UnitCheck
from rmuscle_ros.worker import InferenceWorker

WATCHDOG_S, HEARTBEAT_S, DIAGNOSTICS_S, JOIN_S = 0.1, 0.2, 1.0, 2.0
FAILURES_TO_STOP = 3  # policy calls in a row without a usable answer


class PolicyNode(RetryableLifecycleNode):
    """In: joint_states, prompt and one image topic per camera. Out: joint_trajectory, ~/action_chunk, ~/cache_status,
    ~/status and /diagnostics. Services: see ``services``.

    config_loader and policy_factory have the signatures of ``load_config`` and ``load_policy``.
    """

    def __init__(self, name: str = 'policy_node', config_loader: Callable[..., Any] = load_config,
                 policy_factory: Callable[..., Any] = load_policy, **kwargs: Any):
        super().__init__(name, **kwargs)
        self._load_config, self._make_policy = config_loader, policy_factory
        self._policy: Any = None
        self._worker: InferenceWorker | None = None
        self._buffer = self._output = self._inputs = self._health = self._units = self._device = None
        self._said = ''  # prompt from the topic
        self._give_up, self._failures = '', 0
        self._topics = Topics(self)
        self._params = NodeParameters(self, lambda: self._policy is not None, self._parameters_changed)
        self._time = NodeClock(self, self._moved_back, self._moved_ahead)
        self._diagnostics = self.create_publisher(DiagnosticArray, '/diagnostics', REPORT)
        self._status = self.create_publisher(NodeStatus, '~/status', REPORT)
        steady = Clock(clock_type=ClockType.STEADY_TIME)  # fire without /clock, and however the system time is set
        self.create_timer(WATCHDOG_S, self.guarded(self._watch), clock=steady)
        self.create_timer(HEARTBEAT_S, self.guarded(self._publish_status), clock=steady)
        self.create_timer(DIAGNOSTICS_S, self.guarded(self._publish_diagnostics), clock=steady)
        Services(self)

    # Lifecycle ---

    @transition
    def on_configure(self, state: Any) -> None:
        options = self._params.node_settings
        self.get_logger().info(f'parameters: {self._params.changed_from_default()}')
        required(options)
        self._params.declare_topics()
        contract = check_contract(self._load_config(options.checkpoint), options)
        check_topics({camera: self._params.topic(camera) for camera in contract.cameras})
        try:
            self._policy = self._make_policy(options.checkpoint, self._params.settings, options.library or None,
                                             options.device, contract.cameras, contract.joints.names)
            check_action_mode(self._policy, options)
            self._policy.execute_steps = contract.execute_steps
            self._policy.warm_up(options.prompt)
            self._connect(contract)
        except BaseException:
            self._release()
            raise
        self._log_mapping(contract)

    @transition
    def on_activate(self, state: Any) -> None:
        self._units.restart()
        self._units.check(self._buffer.measured(self._time.now_ns()))
        super().on_activate(state)
        self._device.activated()
        if (ends := self._command_entry()).level != OK:
            self.get_logger().warning(ends.message)
        if self._params.node_settings.autostart_episode:
            self.begin_episode().add_done_callback(self._began)
            self.start_calls()

    @transition
    def on_deactivate(self, state: Any) -> None:
        self.stop_calls()
        super().on_deactivate(state)

    @transition
    def on_cleanup(self, state: Any) -> None:
        self._release()

    @transition
    def on_shutdown(self, state: Any) -> None:
        self.close()

    def close(self) -> None:
        """Stop, hold and free everything from any state; the robot is told to hold before anything is torn down."""
        self.stop_calls()
        self._release()

    def _release(self) -> None:
        """Undo configure. Raises RMuscleError while a policy call does not return."""
        if self._worker is not None and not self._worker.close(JOIN_S):
            age_s = self._worker.call_age_s()
            raise RMuscleError(f'a policy call has been running for {age_s:.1f} s; try again when it has returned'
                               if age_s else 'an episode is being prepared or saved; try again in some seconds')
        had_policy = self._policy is not None
        if had_policy:
            self._policy.close()
        self._policy = self._worker = self._buffer = self._output = self._inputs = self._health = None
        self._units = self._device = None
        self._topics.close()
        if had_policy:
            from rmuscle_core.memory_free import give_memory_back  # imports torch, as the policy did

            give_memory_back()

    # Wiring ---

    def _connect(self, contract: Contract) -> None:
        options = self._params.node_settings
        topics = {camera: self._params.topic(camera) for camera in contract.cameras}
        self._buffer = ObservationBuffer(contract.joints, topics, options.max_age_s, options.max_skew_s,
                                         other_encodings=other_encodings())
        self._device = DeviceDiagnostics(self._policy)
        self._inputs = InputDiagnostics(self._buffer, self._device.name, self._topics)
        self._health = Health(contract.execute_steps / options.control_rate_hz)
        self._output = ChunkPublisher(self._topics.publisher(JointTrajectory, 'joint_trajectory', COMMAND),
                                      self._topics.publisher(ActionChunkMessage, '~/action_chunk', REPORT),
                                      self._topics.publisher(CacheStatus, '~/cache_status', REPORT),
                                      contract.joints, options, contract.execute_steps)
        self._units, self._horizon = UnitCheck(self._policy, contract.joints), contract.horizon
        self._instructed = self._prompt()
        self._worker = InferenceWorker(self._policy, self._observe, self._deliver, self._failed, self._leftover)
        for camera, topic in topics.items():
            kind = CompressedImage if topic.endswith('/compressed') else Image
            self._topics.subscribe(kind, topic, IMAGE, lambda message, camera=camera: self._on_image(camera, message))
        self._topics.subscribe(JointState, 'joint_states', JOINTS, self._on_joints)
        self._topics.subscribe(String, 'prompt', PROMPT, self._on_prompt)

    def _log_mapping(self, contract: Contract) -> None:
        cameras = {camera: self._params.topic(camera) for camera in contract.cameras}
        self.get_logger().info(f'cameras: {cameras}; joints in order:\n{contract.joints.table()}')
        if contract.ignored:
            self.get_logger().warning(f'the checkpoint has no camera {", ".join(contract.ignored)}: not subscribed')
        if unknown := self._params.unknown():  # by now the topics have declared their qos_overrides
            self.get_logger().warning(f'not parameters of this node, so ignored: {", ".join(unknown)}')
        if free := contract.joints.unlimited():
            self.get_logger().warning(f'max_step does not limit how fast {", ".join(free)} may be moved; set it')
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
        self._notice_prompt()

    def _notice_prompt(self) -> None:
        if self._prompt() != self._instructed:
            self._instructed = self._prompt()
            self._worker.abandon_call()  # what it answers nobody asks any more

    def _parameters_changed(self) -> None:
        if self._policy is not None:
            self._policy.settings = self._params.settings
            self._buffer.limit(self._params.node_settings.max_age_s, self._params.node_settings.max_skew_s)
            self._notice_prompt()

    def _moved_back(self, reason: str) -> None:
        if self._worker is not None:
            self.get_logger().warning(f'{reason}: a new episode begins', throttle_duration_sec=LOG_PERIOD_S)
            self._output.forget()
            self.begin_episode().add_done_callback(self._began)

    def _moved_ahead(self, reason: str) -> None:
        if self._worker is not None:
            self.get_logger().warning(f'{reason}: samples and answers from before it are dropped',  # samples by age
                                      throttle_duration_sec=LOG_PERIOD_S)
            self._worker.abandon_call()

    @property
    def configured(self) -> bool:
        """There is a policy: between configure and cleanup."""
        return self._worker is not None

    def begin_episode(self) -> Work:
        """Forget the running episode; the future is done when the first call's references are ready."""
        self._health.episode += 1
        self._worker.abandon_call()  # before the buffer is cleared: nothing computed on its old samples may count
        self._buffer.clear()
        self._output.restart()
        return self._worker.reset(self._prompt())

    def _began(self, work: Work) -> None:
        if not work.cancelled() and (error := work.exception()):  # nobody asked for it, so nobody is answered
            self.complain(error, 'a new episode')

    def save_episode(self, success: bool) -> Work:
        """Write the episode to the library; the future's result is its file, or another future of it."""
        return self._worker.submit(lambda: self._policy.save_episode(success))

    def reload_library(self) -> Work:
        """Read the library's folder again; the future's result is another one, of the number of episodes."""
        return self._worker.submit(lambda: self._policy.reload_library())

    def start_calls(self) -> None:
        """Call the policy from now on."""
        self._give_up, self._failures = '', 0
        self._output.restart()
        self._worker.start()

    def stop_calls(self) -> str:
        """No further chunk, and the robot stays where it is: a hold is the last message. Returns why there was none,
        empty where none was due either."""
        if self._worker is None:
            return ''
        self._worker.stop()
        now_ns = self._time.now_ns()
        if not self._output.commanding or self._output.hold(now_ns, self._buffer.measured(now_ns)):
            return ''
        problem = 'joint_states are not fresh, so no hold was sent; the robot ends its last chunk'
        self.get_logger().warning(problem)
        return problem

    def _watch(self) -> None:
        self._time.check()
        if self._worker is None:
            return
        self._health.waiting_for = self._waiting_for(self._time.now_ns())
        if self._give_up and self._worker.running:
            self.get_logger().error(f'stopped after {FAILURES_TO_STOP} failed calls in a row, last: {self._give_up}; '
                                    '~/start tries again')
            self.stop_calls()
        age_s, limit_s = self._worker.call_age_s(), self._params.node_settings.stall_timeout_s
        if age_s > limit_s and not self._health.stalled:
            self._worker.abandon_call()
            self.get_logger().error(f'a policy call has been running for {age_s:.1f} s, stall_timeout_s is '
                                    f'{limit_s:.1f}; its answer will be dropped')
        if self._health.stalled != (age_s > limit_s):
            self._health.stalled = age_s > limit_s
            self._publish_status()  # at once: whoever watches should not wait for the next period
            self._publish_diagnostics()

    def _publish_status(self) -> None:
        told = {'state': self.state_label, 'last_error': self.last_error, 'prompt': self._prompt()}
        message = status_message(self._health, self._worker, self._output, **told)
        message.header.stamp = self.get_clock().now().to_msg()
        self._status.publish(message)

    def _publish_diagnostics(self) -> None:
        if self._policy is None:
            level = ERROR if self.last_error else OK
            entries = [entry('policy', level, self.last_error or self.state_label, {}, self.get_name())]
        else:
            health, hardware = self._health, self._device.name
            entries = [*self._inputs.entries(self._time.now_ns(), self._params.node_settings.camera_rate_hz),
                       self._command_entry(),
                       policy_entry(self.state_label, health, self._worker, self._output, self.last_error, hardware),
                       cache_entry(self._policy.status(), self._policy.problems, health, hardware),
                       self._device.entry()]
        self._diagnostics.publish(diagnostic_array(self.get_clock().now().to_msg(), entries, self.get_namespace()))

    def _command_entry(self) -> DiagnosticStatus:
        return command_entry(*self._topics.ends('joint_trajectory'), self._device.name)

    # Inference thread ---

    def _prompt(self) -> str:
        return self._said or self._params.node_settings.prompt

    def _waiting_for(self, now_ns: int) -> str:
        if not now_ns:
            return 'no /clock message yet'
        return self._buffer.problem(now_ns) if self._prompt() else (
            'no prompt; set the parameter or publish one on the topic')

    def _observe(self, not_before_ns: int) -> Snapshot | None:
        now_ns, prompt = self._time.now_ns(), self._prompt()
        if not now_ns or not prompt:
            return None
        self._asked = self._policy.settings  # what this call goes by, for its report
        snapshot = self._buffer.take(prompt, now_ns, not_before_ns)
        self._units.check(snapshot and snapshot.measured)
        return snapshot

    def _leftover(self, snapshot: Snapshot) -> Leftover | None:
        return None if self._asked.rtc == 'off' else self._output.leftover(snapshot.stamp_ns, self._horizon)

    def _deliver(self, chunk: ActionChunk, snapshot: Snapshot) -> tuple[int, float]:
        now_ns = self._time.now_ns()
        self._health.call_returned(chunk.report)
        if self._health.late:
            self.get_logger().warning(
                f'a policy call took {self._health.call_ms / 1e3:.2f} s, the executed steps of a chunk last '
                f'{self._health.deadline_s:.2f} s: the robot waits; use a faster profile or more execute_steps',
                throttle_duration_sec=LOG_PERIOD_S)
        due_ns = self._output.deliver(chunk, snapshot, now_ns, self._asked, self._policy.status())
        self._health.chunk_published()
        self._failures, self.last_error = 0, ''
        return due_ns, max(0.0, (due_ns - now_ns) / 1e9)

    def _failed(self, error: Exception) -> None:
        self.complain(error, 'policy call')
        self._health.refusal = getattr(error, 'kind', '')
        if isinstance(error, ObservationError) or self._health.refusal in ('expired', 'boundary'):
            return  # the next observation may do better
        self._failures += 1
        if self._failures >= FAILURES_TO_STOP:
            self._give_up = self.last_error


def main(args: list[str] | None = None) -> int:
    """Entry point of the executable policy_node."""
    return run(PolicyNode, args)
