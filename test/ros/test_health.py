# SPDX-License-Identifier: Apache-2.0
"""What the node tells about itself: the heartbeat on ~/status, deadlines, and the entries of /diagnostics."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
from robot_bench import EchoPolicy
from test_node_calls import T0, Gate, S, answered, diagnosis
from trajectory_msgs.msg import JointTrajectory

from rmuscle.msg import NodeStatus
from rmuscle_core.errors import ObservationError
from rmuscle_core.observation import ActionChunk, CallReport
from rmuscle_ros.health import Health

ROOT = Path(__file__).parents[2]


@pytest.fixture
def sim(make_bench):
    """Factory of an active bench in simulated time at T0, with the heartbeats it sends."""
    def make(policy=None, **parameters):
        bench = make_bench(policy, use_sim_time=True, **parameters)
        bench.beats = []
        bench.robot.create_subscription(NodeStatus, 'policy_node/status', bench.beats.append, 10)
        bench.activate()
        bench.send_time(T0)
        return bench
    return make


def beat(bench, condition, what):
    """Wait for a heartbeat from now on that fulfils the condition; returns it."""
    bench.beats.clear()
    bench.until(lambda: any(map(condition, bench.beats)), what)
    return next(filter(condition, bench.beats))


def values(status):
    return {pair.key: pair.value for pair in status.values}


def test_v20_the_heartbeat_goes_on_while_a_call_is_stalled(sim, capfd):
    gate = Gate(held={2})
    bench = sim(EchoPolicy(gate=gate), stall_timeout_s=0.3)
    bench.send(T0)
    answered(bench)
    alive = beat(bench, lambda s: s.calls == 1, 'the first call')
    assert alive.state == 'active' and alive.running and not alive.stalled and alive.episode == 1
    assert alive.chunks_published == 1 and alive.call_ms == 1.0 and alive.prompt == 'lift' and alive.path == 'dense'
    bench.send_time(T0 + S)
    bench.send(T0 + S)
    stuck = beat(bench, lambda s: s.stalled, 'the stall')
    assert diagnosis(bench, 'policy', lambda s: 'stalled' in s.message).level == b'\x02'
    assert stuck.call_age_s > 0.3
    later = beat(bench, lambda s: s.call_age_s > stuck.call_age_s + 0.5, 'another beat')
    assert later.stalled and later.chunks_published == 1
    assert capfd.readouterr().err.count('stall_timeout_s is 0.3') == 1
    gate.open()
    back = beat(bench, lambda s: not s.stalled, 'the end of the stall')
    assert back.calls == 2 and back.calls_dropped == 1 and back.chunks_published == 1


def test_the_heartbeat_says_what_is_waited_for_and_what_failed(sim):
    bench = sim()
    bench.send_joints(T0, (0,) * 7)
    waits = beat(bench, lambda s: 'base/image_raw' in s.waiting_for, 'the reason')
    assert waits.running and np.isnan(waits.call_ms) and np.isnan(waits.policy_latency_s)
    assert bench.trigger('stop').success
    assert not beat(bench, lambda s: not s.running, 'the stop').waiting_for
    assert bench.change('deactivate') and bench.change('cleanup')
    gone = beat(bench, lambda s: s.state == 'unconfigured', 'the new state')
    assert (gone.calls, gone.episode, gone.running) == (0, 0, False)
    assert bench.set(cameras=['base'])[0].successful and not bench.change('configure')
    assert 'wrist' in beat(bench, lambda s: s.last_error, 'the refusal').last_error


def test_v07_the_heartbeat_names_what_is_missing_when_everything_falls_silent(sim):
    """Then no sample comes that would have the node look."""
    bench = sim()
    bench.send(T0)
    answered(bench)
    bench.send_time(T0 + 3 * S)
    assert '3.00 s old' in beat(bench, lambda s: s.waiting_for, 'the reason').waiting_for
    bench.send(T0 + 3 * S)
    answered(bench, 2)
    assert beat(bench, lambda s: not s.waiting_for, 'its end').running


def test_a_refusal_that_differs_only_in_numbers_is_logged_once(sim, capfd):
    bench = sim(EchoPolicy(gate=lambda policy: np.full((16, 7), len(policy.seen), np.float32)), max_jump=[0.1])
    for number in range(1, 6):
        bench.send_time(T0 + number * S)
        bench.send(T0 + number * S)
        bench.until(lambda n=number: bench.node._output.refused['boundary'] == n, 'the refusal')
    assert capfd.readouterr().err.count('more than max_jump') == 1


def test_a_joint_with_a_number_in_its_name_complains_for_itself(bench, capfd):
    for joint in ('j1', 'j2', 'j1'):
        bench.node.complain(ObservationError(f'the chunk starts 0.3 from joint {joint}'), 'policy call')
    assert capfd.readouterr().err.count('the chunk starts') == 2


def test_trajectories_that_nobody_executes_or_somebody_else_sends_too_are_told(make_bench):
    bench = make_bench()
    assert bench.change('configure')
    assert diagnosis(bench, 'joint trajectory', lambda s: s.level == b'\x00')
    rival = bench.robot.create_publisher(JointTrajectory, 'joint_trajectory', 1)
    assert '2 nodes publish' in diagnosis(bench, 'joint trajectory', lambda s: s.level == b'\x01').message
    bench.robot.destroy_publisher(rival)
    for subscription in list(bench.robot.subscriptions):
        if subscription.topic_name.endswith('/joint_trajectory'):
            bench.robot.destroy_subscription(subscription)
    told = diagnosis(bench, 'joint trajectory', lambda s: 'nobody subscribes' in s.message)
    assert told.level == b'\x01' and f'{bench.namespace}/joint_trajectory' in told.message


class SlowPolicy(EchoPolicy):
    """Reports durations (ms) in turn, and half of all tokens and neurons reused."""

    durations = (399.0, 401.0, 401.0, 399.0)

    def infer(self, observation, leftover=None):
        chunk = super().infer(observation, leftover)
        duration = self.durations[(len(self.seen) - 1) % len(self.durations)]
        report = CallReport(path='library', tokens=8, tokens_recomputed=4, neurons=10, neurons_evaluated=5,
                            milliseconds={'total': duration})
        return ActionChunk(chunk.actions, report, chunk.stamp_s)


def test_calls_longer_than_the_executed_steps_are_counted_and_told_once(sim, capfd):
    bench = sim(SlowPolicy())  # 8 steps at 20 Hz last 0.4 s
    for number, late in enumerate((False, True, True, False)):
        bench.send_time(T0 + number * S)
        bench.send(T0 + number * S)
        answered(bench, number + 1)
        found = diagnosis(bench, 'policy', lambda s, n=number: values(s).get('calls') == str(n + 1))
        assert values(found)['deadline_misses'] == str(min(number, 2))
        assert ('the last call took 0.40 s' in found.message) == late
        assert (found.level == b'\x01') == late
    assert beat(bench, lambda s: s.calls == 4, 'the last').deadline_misses == 2
    assert capfd.readouterr().err.count('the robot waits') == 1  # throttled


def test_health_of_calls():
    health = Health(deadline_s=0.4)
    assert not health.late and np.isnan([*health.reuse().values()]).all() and np.isnan(health.timing()['call_p50_ms'])
    for duration in (*range(1, 100), 1000.0):
        health.call_returned(CallReport(tokens=4, tokens_recomputed=1, neurons=4, neurons_evaluated=3,
                                        milliseconds={'total': duration}))
    assert health.late and health.deadline_misses == 1
    timing = health.timing()
    assert timing['call_p50_ms'] == 50.5 and 99 < timing['call_p99_ms'] < 1000 and np.isnan(timing['chunk_age_s'])
    assert health.reuse() == {'tokens_reused_ratio': 0.75, 'neurons_reused_ratio': 0.25}
    health.chunk_published()
    assert health.timing()['chunk_age_s'] >= 0


def test_diagnostics_name_the_device_and_everything_a_dashboard_needs(make_bench, checkpoint):
    bench = make_bench(real=True, checkpoint=str(checkpoint), device='cpu', slots=4)
    bench.activate()
    bench.fed_until(lambda: bench.statuses, 'a call', timeout_s=60)
    device = diagnosis(bench, 'device', lambda s: True)
    assert device.level == b'\x00' and float(values(device)['memory_free_gb']) > 0
    assert values(device)['captures_after_activation'] == '0'
    policy = diagnosis(bench, 'policy', lambda s: values(s)['calls'] != '0')
    cache = diagnosis(bench, 'cache', lambda s: values(s)['served_dense'] != '0')
    camera = diagnosis(bench, 'camera base', lambda s: values(s).get('encoding') == 'rgb8')
    joints = diagnosis(bench, 'joint states', lambda s: True)
    assert len({s.hardware_id for s in (device, policy, cache, camera, joints)}) == 1 and device.hardware_id
    for entry, names in ((policy, 'state call_p50_ms call_p99_ms chunk_age_s deadline_misses policy_latency_s episode'),
                         (cache, 'hit_ratio tokens_reused_ratio neurons_reused_ratio library_entries slots_ready'),
                         (camera, 'age_s rate_hz encoding frames_lost frames_bad'), (joints, 'age_s bad_messages')):
        assert set(names.split()) <= set(values(entry)), entry.name


def test_captures_after_activation_are_a_warning(sim):
    policy = EchoPolicy()
    policy.engine = type('Engine', (), {'captures': 3})()
    bench = sim(policy)
    assert values(diagnosis(bench, 'device', lambda s: True))['captures_after_activation'] == '0'
    policy.engine.captures = 5
    found = diagnosis(bench, 'device', lambda s: s.level == b'\x01')
    assert '2 graphs captured' in found.message


def test_only_tools_for_people_print():
    """A node speaks through its logger; printed lines have no time, level or name and reach no /rosout."""
    allowed = {'demo', 'spin.py', 'parameter_docs.py'}
    found = []
    for path in sorted((ROOT / 'rmuscle_ros').rglob('*.py')):
        if not allowed & set(path.relative_to(ROOT).parts):
            calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
            found += [f'{path.name}:{n.lineno}' for n in calls if getattr(n.func, 'id', '') == 'print']
    assert not found


def test_nothing_is_logged_per_call(sim, capfd):
    bench = sim()
    capfd.readouterr()
    for number in range(10):
        bench.send_time(T0 + number * S)
        bench.send(T0 + number * S)
        answered(bench, number + 1)
    assert capfd.readouterr().err == ''
