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
from rmuscle_core.guard import ChunkRefused, ConsumedSteps, Planned, Trajectory, hold, leftover_of, plan_trajectory
from rmuscle_core.observation import ActionChunk, CallReport, Leftover
from rmuscle_core.sensing.joints import JointMap
from rmuscle_core.sensing.observe import Snapshot
from rmuscle_core.settings import Settings
from rmuscle_ros.params import NodeSettings

NAN = float('nan')
# After its end a controller has done with a trajectory, also one whose clock is a little behind: from then on somebody
# else may have moved the robot, and the last command no longer says where it is.
SETTLED_NS = 1_000_000_000


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
    """Turns policy answers into messages. ``leftover`` and ``deliver`` run on the inference thread, ``deliver`` under
    the worker's lock, ``hold`` on the executor thread after the worker has stopped: one caller writes at a time.

    refused: counts by kind of refusal. trimmed, clamped, capped: steps left out as past, values held at a limit, values
    held back by max_step. latency_s: the gap between the last action of a chunk and the first of the next by the
    steady clock, NaN before there is one.
    """

    def __init__(self, trajectories: Publisher, chunks: Publisher, cache: Publisher, joints: JointMap,
                 options: NodeSettings, execute_steps: int):
        self._trajectories, self._chunks, self._cache = trajectories, chunks, cache
        self._joints, self._options, self._execute_steps = joints, options, execute_steps
        self._previous: Trajectory | None = None  # what the next chunk continues
        self._sent: Trajectory | None = None  # what the robot was told last, unless that was to hold
        self._ends_at: float | None = None  # steady clock
        self._consumed = ConsumedSteps()
        self.commanding = False  # a trajectory of ours may still be running
        self.refused: Counter[str] = Counter()
        self.calls = self.published = self.trimmed = self.clamped = self.capped = 0
        self.latency_s = NAN

    def restart(self) -> None:
        """The next chunk continues nothing; where the robot is still moving by our last one, it joins that."""
        self._previous = self._ends_at = None
        self._consumed.restart()

    def forget(self) -> None:
        """Nothing is known of what the robot executes: the clock was set back under it."""
        self.restart()
        self._sent = None

    def leftover(self, stamp_ns: int, horizon: int) -> Leftover | None:
        """What the robot executes meanwhile of a chunk of ``horizon`` steps observed at ``stamp_ns``; None: nothing."""
        positions = leftover_of(self._previous, stamp_ns, self._options.control_rate_hz, horizon)
        if positions is None:
            return None
        actions = self._joints.to_policy(positions).astype(np.float32)
        return Leftover(actions, min(self._consumed.steps, len(actions)))

    def deliver(self, chunk: ActionChunk, snapshot: Snapshot, now_ns: int, settings: Settings,
                status: Mapping[str, int]) -> int:
        """Publish, and return from when on (ns) the observation for the next call may be taken.

        Raises ChunkRefused; the robot then finishes what it has.
        """
        self.calls += 1
        realtime = settings.rtc != 'off'
        try:
            planned = self._plan(chunk, snapshot, now_ns, realtime)
        except ChunkRefused as refusal:
            self.refused[refusal.kind] += 1
            raise
        trajectory, names = planned.trajectory, self._joints.names
        self._trajectories.publish(trajectory_message(trajectory))
        self._note(planned, now_ns)
        observed_ns, rate_hz = snapshot.stamp_ns, self._options.control_rate_hz
        self._chunks.publish(chunk_message(chunk, observed_ns, names, rate_hz, self._execute_steps, self.calls))
        self._cache.publish(cache_message(chunk.report, settings, status, observed_ns, self.calls, self.latency_s))
        last = min(self._execute_steps, len(trajectory.times_ns)) - 1
        lead_s = max(self._options.call_lead_s, self._consumed.steps / rate_hz if realtime else 0.0)
        return trajectory.stamp_ns + int(trajectory.times_ns[last]) - round(lead_s * 1e9)

    def hold(self, now_ns: int, measured: np.ndarray | None) -> bool:
        """Tell the robot to stay where it is commanded to be now; where nothing is known of that, at ``measured`` [S].

        The measured arm sags behind its command, so holding there would let it sink a little at each stop. A robot that
        has settled is told nothing. False when it may be moving and neither is known.
        """
        running, sent = self._running(now_ns), self._sent
        if sent is None or now_ns < sent.end_ns + SETTLED_NS:
            position = measured if running is None else running.at(now_ns)  # None: the clock was set back meanwhile
            if position is None:
                return False
            trajectory = hold(self._joints.names, position, self._options.control_rate_hz)
            self._trajectories.publish(trajectory_message(trajectory))
        self._sent, self.commanding = None, False
        self.restart()
        return True

    def _plan(self, chunk: ActionChunk, snapshot: Snapshot, now_ns: int, realtime: bool) -> Planned:
        """With real-time chunking the whole rest of the chunk is sent, so that a late call finds the robot moving; a
        chunk that was computed to follow the running one is not bent towards it a second time, unless it came after
        that had ended: the robot has stopped where the chunk moves on.
        """
        options, running = self._options, self._running(now_ns)
        follows = chunk.report.guided and running is not None and now_ns < running.end_ns
        return plan_trajectory(
            self._joints.to_robot(chunk.actions), self._joints.names, now_ns=now_ns, rate_hz=options.control_rate_hz,
            stamp_ns=now_ns if options.stamp_mode == 'now' and not realtime else snapshot.stamp_ns,
            execute_steps=len(chunk.actions) if realtime else self._execute_steps, limits=self._joints.limits,
            measured=snapshot.measured, previous=running,
            blend_s=0.0 if follows else options.blend_s, velocities=options.send_velocities)

    def _running(self, now_ns: int) -> Trajectory | None:
        """What the robot was sent last, for as long as that says where it is: by now not where the observation saw it.
        """
        sent = self._sent
        return sent if sent is not None and sent.stamp_ns <= now_ns < sent.end_ns + SETTLED_NS else None

    def _note(self, planned: Planned, now_ns: int) -> None:
        trajectory, now = planned.trajectory, time.monotonic()
        self.latency_s = NAN if self._ends_at is None else max(0.0, now - self._ends_at)
        self._consumed.note(planned.trimmed)
        self._sent = trajectory
        self._previous, self._ends_at = trajectory, now + (trajectory.end_ns - now_ns) / 1e9
        self.commanding, self.published = True, self.published + 1
        self.trimmed += planned.trimmed
        self.clamped += planned.clamped
        self.capped += planned.capped
