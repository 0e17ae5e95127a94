# SPDX-License-Identifier: Apache-2.0
"""Time that starts late, runs back, leaps ahead or is set: V11, V12, V14 and their siblings."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from robot_bench import EchoPolicy
from test_node_calls import DT, T0, S, answered, diagnosis, stamp_of


class SetClock:
    """A node's clock whose system time somebody sets."""

    ros_time_is_active = False

    def __init__(self, clock):
        self._clock, self.shift_ns = clock, 0

    def now(self):
        return SimpleNamespace(nanoseconds=self._clock.now().nanoseconds + self.shift_ns)


@pytest.fixture
def set_clock(make_bench):
    """Factory of an active bench on system time, and the clock that its node reads."""
    def make(policy=None, **parameters):
        bench = make_bench(policy, **parameters)
        bench.activate()
        clock = bench.node._time._clock = SetClock(bench.node._time._clock)
        bench.now_ns = lambda: clock.now().nanoseconds  # the cameras' machine is this one
        return bench, clock
    return make


@pytest.fixture
def sim(make_bench):
    def make(policy=None, **parameters):
        bench = make_bench(policy, use_sim_time=True, **parameters)
        bench.activate()
        return bench
    return make


def log(bench, monkeypatch):
    """The node's warnings, as a list that grows."""
    said = []
    monkeypatch.setattr(bench.node, 'get_logger', lambda: SimpleNamespace(
        warning=lambda text, **_: said.append(text), error=said.append, info=lambda text: None))
    return said


def play(bench, start_ns, end_ns):
    """One loop of a bag at 10 Hz: clock and observations; returns the stamps of the calls it led to."""
    first, due_ns, buffer, answers = len(bench.policy.seen), start_ns, bench.node._buffer, len(bench.statuses)
    for now_ns in range(start_ns, end_ns, S // 10):
        bench.send_time(now_ns)
        bench.send(now_ns)
        bench.until(lambda now_ns=now_ns: all(buffer.ages_s(source, now_ns)[0] == 0
                                              for source in ('base', 'wrist', None)), 'arrival of the observation')
        if now_ns >= due_ns:
            answers, due_ns = answers + 1, now_ns + 8 * DT
            answered(bench, answers)
    return [round(o.stamp_s * S) for o in bench.policy.seen[first:]]


def test_v11_three_loops_of_a_bag_are_three_episodes(sim, monkeypatch):
    bench = sim()
    said = log(bench, monkeypatch)
    loops = [play(bench, start * S, end * S) for start, end in ((100, 120), (10, 30), (10, 30))]
    assert [len(stamps) for stamps in loops] == [50] * 3
    for stamps, (start, end) in zip(loops, ((100, 120), (10, 30), (10, 30))):
        assert stamps == sorted(stamps) and start * S <= stamps[0] and stamps[-1] < end * S
    assert sum('clock moved back' in text for text in said) == 2
    assert bench.policy.resets == ['lift'] * 3  # by activation and twice by the clock: the window is at its start
    assert bench.node._health.episode == 3


def test_v11_message_of_the_loop_before_that_arrives_late_is_not_used(sim):
    bench = sim()
    play(bench, T0, T0 + S)
    bench.send_time(10 * S)
    bench.send_image('wrist', T0 + S)
    bench.until(lambda: bench.node._buffer.streams['wrist'].latest, 'the late frame')
    bench.send_image('base', 10 * S)
    bench.send_joints(10 * S, (0,) * 7)
    found = diagnosis(bench, 'camera wrist', lambda s: 'future' in s.message)
    assert found.level == b'\x02'
    bench.send_time(11 * S)
    calls = len(bench.policy.seen)
    bench.send(11 * S)
    bench.until(lambda: len(bench.policy.seen) > calls, 'the next call')
    assert bench.policy.seen[-1].stamp_s == 11


def test_clock_that_leaps_ahead_drops_the_call_in_flight_and_old_samples(sim, monkeypatch):
    entered, gate = threading.Event(), threading.Event()

    def block(policy):
        entered.set()
        gate.wait(20)

    bench = sim(EchoPolicy(gate=block), stamp_mode='now', stall_timeout_s=60.0)
    said = log(bench, monkeypatch)
    bench.send_time(T0)
    assert not said  # the first /clock is a start, not a leap
    bench.send(T0)
    bench.until(entered.is_set, 'the call')
    bench.send_time(T0 + 100 * S)
    assert [text.partition(':')[0] for text in said] == ['clock leapt ahead by 100.00 s']
    gate.set()
    bench.until(lambda: bench.node._worker.discarded == 1, 'the late answer')
    bench.send_joints(T0 + 100 * S, (0,) * 7)  # the frames of before are still there, and too old
    diagnosis(bench, 'camera base', lambda s: '100.00 s old' in s.message)
    bench.send(T0 + 100 * S)
    answered(bench)
    assert [stamp_of(t) for t in bench.trajectories] == [T0 + 100 * S] and bench.policy.resets == ['lift']


def test_v12_nothing_moves_before_the_first_clock_and_its_jump_is_the_start(sim, monkeypatch):
    bench = sim()
    said = log(bench, monkeypatch)
    for stamp_ns in (0, 50 * S, T0):
        bench.send(stamp_ns)
    found = diagnosis(bench, 'policy', lambda s: '/clock' in s.message)
    assert found.level == b'\x01' and bench.policy.seen == []
    bench.send_time(T0)
    bench.send(T0)
    answered(bench)
    assert stamp_of(bench.trajectories[0]) == T0 and len(bench.trajectories) == 1  # none before
    assert said == [] and bench.policy.resets == ['lift']


def test_v14_system_time_set_back_stops_neither_watchdog_nor_calls(set_clock, monkeypatch):
    """An hour back in the middle of a call: the watchdog fires all the same, and the next call does not wait an hour
    for the end of the last chunk."""
    entered, gate = threading.Event(), threading.Event()

    def block(policy):
        if len(policy.seen) == 2:
            entered.set()
            gate.wait(20)

    bench, clock = set_clock(EchoPolicy(gate=block), stall_timeout_s=0.2)
    said = log(bench, monkeypatch)
    bench.send()
    answered(bench)
    bench.until(lambda: (bench.send(), entered.is_set())[1], 'the second call')
    clock.shift_ns = -3600 * S
    bench.until(lambda: bench.node._health.stalled, 'the watchdog')
    assert 0.2 < bench.node._worker.call_age_s() < 60
    bench.until(lambda: any('clock moved back by 3600.0' in text for text in said), 'the report')
    gate.set()
    bench.until(lambda: (bench.send(), len(bench.trajectories) >= 3)[1], 'calls at the new time')
    assert all(abs(stamp_of(t) - clock.now().nanoseconds) < 60 * S for t in bench.trajectories[1:])
    assert 0 <= bench.node._output.latency_s < 60 and bench.policy.resets == ['lift'] * 2


@pytest.mark.parametrize(('shift_s', 'report'), [(-3600, 'moved back'), (3600, 'leapt ahead'), (0.05, ''), (-0.05, '')])
def test_v14_steps_of_the_system_time_are_told_from_slewing(set_clock, monkeypatch, shift_s, report):
    bench, clock = set_clock()
    said = log(bench, monkeypatch)
    bench.node._time.check()
    clock.shift_ns = round(shift_s * S)
    for _ in range(3):
        bench.node._time.check()
    assert len(said) == bool(report) and all(report in text for text in said)


def test_v14_thread_that_is_held_up_takes_that_for_no_step(set_clock, monkeypatch):
    bench, clock = set_clock()
    said = log(bench, monkeypatch)
    readings = iter((0, 0, S, 3 * S))  # before and after the system time is read
    monkeypatch.setattr('rmuscle_ros.clock.time', SimpleNamespace(monotonic_ns=lambda: next(readings)))
    bench.node._time._offset_ns = None
    bench.node._time.check()
    clock.shift_ns = 2 * S
    bench.node._time.check()
    assert said == []
