# SPDX-License-Identifier: Apache-2.0
"""From messages to a policy call and back to a trajectory. Time is simulated where it matters."""

from __future__ import annotations

import threading

import numpy as np
from diagnostic_msgs.msg import DiagnosticArray
from rclpy.qos import DurabilityPolicy, QoSProfile
from robot_bench import ARM7, EchoPolicy
from std_msgs.msg import String
from std_srvs.srv import SetBool, Trigger

from rmuscle_core.guard import Trajectory, check_trajectory

S = 1_000_000_000
T0 = 100 * S
DT = S // 20


class Gate:
    """Holds the policy in its call until opened; ``entered`` counts calls."""

    def __init__(self, held=()):
        self.entered, self._held, self._open = 0, set(held), threading.Event()

    def __call__(self, policy):
        self.entered += 1
        if self.entered in self._held:
            assert self._open.wait(20), 'the test never opened the gate'

    def open(self):
        self._open.set()


def answered(bench, count=1):
    bench.until(lambda: len(bench.statuses) >= count and len(bench.trajectories) >= count, f'answer {count}')


def stamp_of(message):
    return message.header.stamp.sec * S + message.header.stamp.nanosec


def times(trajectory):
    return [p.time_from_start.sec * S + p.time_from_start.nanosec for p in trajectory.points]


def positions(trajectory):
    return np.array([p.positions for p in trajectory.points])


def step_to(bench, now, count, **observation):
    """Move the clock, send an observation and wait for the chunk made of it."""
    bench.send_time(now)
    bench.send(now, **observation)
    answered(bench, count)


def diagnosis(bench, name, condition):
    """Wait for an entry of /diagnostics that fulfils the condition; returns it."""
    found = []

    def keep(message):
        wanted = f'{bench.namespace.strip("/")}/rmuscle: {name}'
        found.extend(s for s in message.status if s.name == wanted and condition(s))

    subscription = bench.robot.create_subscription(DiagnosticArray, '/diagnostics', keep, 10)
    bench.until(lambda: found, f'diagnosis of {name}')
    bench.robot.destroy_subscription(subscription)
    return found[0]


def test_one_call_gives_trajectory_chunk_and_status(sim):
    bench = sim()
    bench.send(T0, positions=(.1,) * 7)
    answered(bench)
    trajectory, chunk, status = bench.trajectories[0], bench.chunks[0], bench.statuses[0]
    assert stamp_of(trajectory) == stamp_of(chunk) == stamp_of(status) == T0
    assert times(trajectory) == [DT * (i + 1) for i in range(8)]
    expected = np.tile(.1 + .01 * np.arange(1, 9)[:, None], 7)
    np.testing.assert_allclose([p.positions for p in trajectory.points], expected, atol=1e-6)
    assert all(len(p.velocities) == 7 for p in trajectory.points) and not any(trajectory.points[-1].velocities)
    assert (chunk.horizon, chunk.execute_steps, chunk.dt, chunk.call) == (16, 8, .05, 1)
    np.testing.assert_allclose(np.reshape(chunk.actions, (16, 7))[-1], .26, atol=1e-6)
    assert (status.call, status.path, status.library_entries, status.slots) == (1, 'dense', 3, 2)
    assert list(status.stages) == ['act'] and status.total_ms == 1.0
    check_trajectory(Trajectory(tuple(trajectory.joint_names), T0, np.array(times(trajectory)),
                                np.array([p.positions for p in trajectory.points])), ARM7, T0)
    bench.until(lambda: bench.policy.intervals, 'the interval')
    assert bench.policy.intervals == [.4]


def test_next_call_sees_only_what_followed_the_executed_steps(sim):
    bench = sim()
    bench.send(T0)
    answered(bench)
    for now in (T0 + 4 * DT, T0 + 8 * DT - 1, T0 + 8 * DT):
        bench.send_time(now)
        bench.send(now)
    answered(bench, 2)
    assert [round(o.stamp_s * S) for o in bench.policy.seen] == [T0, T0 + 8 * DT]


def test_v13_late_answer_starts_at_the_first_step_still_ahead(sim):
    gate = Gate(held={1})
    bench = sim(EchoPolicy(gate=gate))
    bench.send(T0)
    bench.until(lambda: gate.entered, 'the call')
    bench.send_time(T0 + 330_000_000)
    gate.open()
    answered(bench)
    assert stamp_of(bench.trajectories[0]) == T0
    assert times(bench.trajectories[0]) == [DT * i for i in range(7, 15)]


def test_v13_answer_after_its_last_step_is_not_published(sim):
    gate = Gate(held={1})
    bench = sim(EchoPolicy(gate=gate))
    bench.send(T0)
    bench.until(lambda: gate.entered, 'the call')
    bench.send_time(T0 + 950_000_000)
    gate.open()
    found = diagnosis(bench, 'policy', lambda s: {v.key: v.value for v in s.values}.get('chunks_expired') == '1')
    assert found.level != b'\x00'
    bench.send(T0 + 950_000_000, positions=(.5,) * 7)
    answered(bench)
    assert stamp_of(bench.trajectories[0]) == T0 + 950_000_000 and len(bench.trajectories) == 1


def test_answer_after_stop_is_dropped_and_the_hold_is_last(sim):
    gate = Gate(held={2})
    bench = sim(EchoPolicy(gate=gate))
    bench.send(T0)
    answered(bench)
    bench.send_time(T0 + S)
    bench.send(T0 + S, positions=(.06,) * 7)  # sagging below the last command, .08
    bench.until(lambda: gate.entered == 2, 'the second call')
    assert bench.trigger('stop').success
    gate.open()
    bench.until(lambda: bench.node._worker.discarded == 1, 'the late answer')
    bench.until(lambda: len(bench.trajectories) == 2, 'the hold')
    assert stamp_of(bench.trajectories[1]) == 0 and len(bench.trajectories[1].points) == 1
    np.testing.assert_allclose(bench.trajectories[1].points[0].positions, [.08] * 7, atol=1e-6)
    assert bench.trigger('start').success
    answered(bench, 2)
    bench.until(lambda: len(bench.trajectories) == 3, 'a chunk after start')
    assert len(bench.statuses) == 2  # what was dropped left no status either


def test_reset_drops_the_call_in_flight_and_old_samples(sim):
    gate = Gate(held={1})
    bench = sim(EchoPolicy(gate=gate))
    bench.send(T0)
    bench.until(lambda: gate.entered == 1, 'the call')
    answer = bench.ask(Trigger, 'policy_node/reset_episode', Trigger.Request())
    bench.until(lambda: bench.node._worker._tasks, 'the request')
    assert not answer.done()
    gate.open()
    bench.until(answer.done, 'the answer')
    assert bench.node._worker.discarded == 1 and not bench.trajectories
    assert bench.policy.resets == ['lift', 'lift']
    bench.send_time(T0 + S)
    bench.send(T0 + S)
    answered(bench)
    assert stamp_of(bench.trajectories[0]) == T0 + S


def test_v20_stalled_call_is_reported_once_and_its_answer_dropped(sim, capfd):
    gate = Gate(held={1})
    bench = sim(EchoPolicy(gate=gate), stall_timeout_s=0.2)
    bench.send(T0)
    found = diagnosis(bench, 'policy', lambda s: 'stalled' in s.message)
    assert found.level == b'\x02' and capfd.readouterr().err.count('stall_timeout_s is 0.2') == 1
    gate.open()
    bench.until(lambda: bench.node._worker.discarded == 1, 'the late answer')
    bench.send_time(T0 + S)
    bench.send(T0 + S)
    answered(bench)
    assert stamp_of(bench.trajectories[0]) == T0 + S


def test_v19_chunk_with_nan_is_refused_and_three_in_a_row_stop(sim):
    bad = np.zeros((16, 7), np.float32)
    bad[3, 1] = np.nan
    policy = EchoPolicy(gate=lambda policy: bad if len(policy.seen) > 1 else None)
    bench = sim(policy)
    bench.send(T0)
    answered(bench)
    for number in range(1, 4):
        bench.send_time(T0 + (8 + number) * DT)
        bench.send(T0 + (8 + number) * DT)
        bench.until(lambda number=number: bench.node._output.refused['nonfinite'] >= number, 'refusal')
    bench.until(lambda: not bench.node._worker.running, 'the stop')
    found = diagnosis(bench, 'policy', lambda s: 'step 3 of joint j2' in s.message)
    assert found.level == b'\x02'
    bench.until(lambda: len(bench.trajectories) == 2, 'the hold')
    assert len(bench.trajectories[1].points) == 1 and len(bench.statuses) == 1


def test_v25_parameters_and_joints_are_served_while_the_policy_works(sim):
    gate = Gate(held={1})
    bench = sim(EchoPolicy(gate=gate), stall_timeout_s=30.0)
    bench.send(T0)
    bench.until(lambda: gate.entered, 'the call')
    for number in range(20):
        bench.send_joints(T0 + number, (number,) * 7)
        assert bench.get('prompt')[0].string_value == 'lift'
    bench.until(lambda: bench.node._buffer.measured(T0)[0] == 19, 'the last joint state')
    assert not bench.statuses  # all of it within one policy call
    gate.open()
    answered(bench)


def test_v22_prompt_topic_overrides_the_parameter(sim):
    bench = sim()
    latched = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
    publisher = bench.robot.create_publisher(String, 'prompt', latched)
    for number, (said, used) in enumerate((('open the box', 'open the box'), ('', 'lift'))):
        publisher.publish(String(data=said))
        bench.until(lambda said=said: bench.node._said == said, 'the prompt')
        bench.send_time(T0 + number * S)
        bench.send(T0 + number * S)
        answered(bench, number + 1)
        assert bench.policy.seen[-1].prompt == used


def test_save_waits_for_the_writer_without_blocking_others(sim):
    gate, policy = threading.Event(), EchoPolicy()
    save = policy.save_episode
    policy.save_episode = lambda success: (gate.wait(20), save(success))[1]
    bench = sim(policy)
    answer = bench.ask(SetBool, 'policy_node/save_episode', SetBool.Request(data=True))
    bench.until(lambda: bench.node._worker._busy, 'the writer')
    assert bench.get('prompt')[0].string_value == 'lift' and not answer.done()
    gate.set()
    bench.until(answer.done, 'the answer')
    assert answer.result().success and answer.result().message == 'episode-1' and policy.saved == [True]
