# SPDX-License-Identifier: Apache-2.0
"""What leaves the node per policy call: JointTrajectory for the robot, ActionChunk and CacheStatus for people."""

from __future__ import annotations

import array
import time
from collections import Counter
from collections.abc import Mapping

import numpy as np
from builtin_interfaces.msg import Duration, Time
from rclpy.publisher import Publisher
from trajectory_msgs.msg import JointTrajectory, JointTrajectoryPoint

from rmuscle.msg import ActionChunk as ActionChunkMessage
from rmuscle.msg import CacheStatus
from rmuscle_core.guard import ChunkRefused, Trajectory, hold, plan_trajectory
from rmuscle_core.observation import ActionChunk, CallReport
from rmuscle_core.sensing.joints import JointMap
from rmuscle_core.sensing.observe import Snapshot
from rmuscle_core.settings import Settings
from rmuscle_ros.params import NodeSettings

NAN = float('nan')


def time_message(nanoseconds: int) -> Time:
    return Time(sec=nanoseconds // 1_000_000_000, nanosec=nanoseconds % 1_000_000_000)


def trajectory_message(trajectory: Trajectory) -> JointTrajectory:
    """One point per step, with velocities where the trajectory has them."""
    message = JointTrajectory(joint_names=list(trajectory.joint_names))
    message.header.stamp = time_message(trajectory.stamp_ns)
    for i, since in enumerate(trajectory.times_ns.tolist()):
        sec, nanosec = divmod(since, 1_000_000_000)
        point = JointTrajectoryPoint(positions=trajectory.positions[i].tolist(),
                                     time_from_start=Duration(sec=sec, nanosec=nanosec))
        if trajectory.velocities is not None:
            point.velocities = trajectory.velocities[i].tolist()
        message.points.append(point)
    return message


def chunk_message(chunk: ActionChunk, stamp_ns: int, joint_names: tuple[str, ...], rate_hz: float, execute_steps: int,
                  call: int) -> ActionChunkMessage:
    """The whole chunk [H, A] as the policy returned it, in the checkpoint's units."""
    message = ActionChunkMessage(
        joint_names=list(joint_names), dt=1.0 / rate_hz, horizon=len(chunk.actions), execute_steps=execute_steps,
        reference=chunk.report.reference, path=chunk.report.path, call=call)
    message.header.stamp = time_message(stamp_ns)
    message.actions = array.array('f', chunk.actions.astype(np.float32).ravel())
    return message


def cache_message(report: CallReport, settings: Settings, status: Mapping[str, int], stamp_ns: int, call: int,
                  latency_s: float) -> CacheStatus:
    """What the call did, with the ratios it was asked for and the counters of ``policy.status()``."""
    stages = {name: value for name, value in report.milliseconds.items() if name != 'total'}
    counters = {name: value for name, value in status.items() if name in CacheStatus.get_fields_and_field_types()}
    message = CacheStatus(
        call=call, mode=report.mode, path=report.path, reason=report.reason, reference=report.reference,
        similarity=report.similarity, token_ratio=settings.token_ratio, neuron_ratio=settings.neuron_ratio,
        tokens=report.tokens, tokens_recomputed=report.tokens_recomputed, neurons=report.neurons,
        neurons_evaluated=report.neurons_evaluated, total_ms=report.milliseconds.get('total', NAN),
        stages=list(stages), policy_latency_s=latency_s, **{'shadow_difference': NAN, **counters})
    message.stage_ms = array.array('f', stages.values())
    message.header.stamp = time_message(stamp_ns)
    return message


class ChunkPublisher:
    """Turns policy answers into messages. ``deliver`` runs on the inference thread under the worker's lock, ``hold``
    on the executor thread after the worker has stopped, so there is one caller at a time.

    refused, clamped: counts by kind of refusal, and of values held at a limit. latency_s: the gap between the last
    action of a chunk and the first of the next by the steady clock, NaN before there is one.
    """

    def __init__(self, trajectories: Publisher, chunks: Publisher, cache: Publisher, joints: JointMap,
                 options: NodeSettings, execute_steps: int):
        self._trajectories, self._chunks, self._cache = trajectories, chunks, cache
        self._joints, self._options, self._execute_steps = joints, options, execute_steps
        self._previous: Trajectory | None = None
        self._ends_at: float | None = None  # steady clock
        self.commanding = False  # a trajectory of ours may still be running
        self.refused: Counter[str] = Counter()
        self.nonfinite_in_a_row = self.calls = self.published = self.clamped = 0
        self.latency_s = self.total_ms = NAN

    def restart(self) -> None:
        """The next chunk follows no command of ours."""
        self._previous = self._ends_at = None

    def deliver(self, chunk: ActionChunk, snapshot: Snapshot, now_ns: int, settings: Settings,
                status: Mapping[str, int]) -> int:
        """Publish, and return when the executed steps end (ns).

        Raises ChunkRefused; the robot then finishes what it has.
        """
        rate_hz, options = self._options.control_rate_hz, self._options
        names = self._joints.names
        self.calls += 1
        stamp_ns = now_ns if options.stamp_mode == 'now' else snapshot.stamp_ns
        try:
            trajectory, clamped = plan_trajectory(
                self._joints.to_robot(chunk.actions), names, stamp_ns=stamp_ns, now_ns=now_ns, rate_hz=rate_hz,
                execute_steps=self._execute_steps, limits=self._joints.limits, measured=snapshot.measured,
                previous=self._previous, blend_s=options.blend_s, velocities=options.send_velocities)
        except ChunkRefused as refusal:
            self.refused[refusal.kind] += 1
            self.nonfinite_in_a_row = self.nonfinite_in_a_row + 1 if refusal.kind == 'nonfinite' else 0
            raise
        self._trajectories.publish(trajectory_message(trajectory))
        self._note(trajectory, clamped, chunk.report, now_ns)
        observed_ns = snapshot.stamp_ns
        self._chunks.publish(chunk_message(chunk, observed_ns, names, rate_hz, self._execute_steps, self.calls))
        self._cache.publish(cache_message(chunk.report, settings, status, observed_ns, self.calls, self.latency_s))
        return trajectory.end_ns

    def hold(self, position: np.ndarray) -> None:
        """Tell the robot to stay at ``position`` [S], robot units."""
        trajectory = hold(self._joints.names, position, self._options.control_rate_hz)
        self._trajectories.publish(trajectory_message(trajectory))
        self.commanding = False
        self.restart()

    def _note(self, trajectory: Trajectory, clamped: int, report: CallReport, now_ns: int) -> None:
        self.commanding, now = True, time.monotonic()
        self.latency_s = NAN if self._ends_at is None else max(0.0, now - self._ends_at)
        self._previous, self._ends_at = trajectory, now + (trajectory.end_ns - now_ns) / 1e9
        self.published, self.clamped, self.nonfinite_in_a_row = self.published + 1, self.clamped + clamped, 0
        self.total_ms = report.milliseconds.get('total', NAN)


