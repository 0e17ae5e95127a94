# SPDX-License-Identifier: Apache-2.0
"""Stop and deactivate: the robot holds its command, and nothing comes after that word."""

from __future__ import annotations

import threading

import numpy as np
from robot_bench import EchoPolicy
from test_node_calls import DT, T0, S, answered, positions, stamp_of, step_to


def test_stop_with_stale_joints_holds_the_running_command(sim):
    bench = sim()
    bench.send(T0)
    answered(bench)
    bench.send_time(T0 + 3 * DT)
    bench.node._buffer.clear()
    assert bench.node._buffer.measured(T0 + 3 * DT) is None
    assert bench.trigger('stop').success
    bench.until(lambda: len(bench.trajectories) == 2, 'the hold')
    hold = bench.trajectories[1]
    assert stamp_of(hold) == 0 and len(hold.points) == 1 and not any(hold.points[0].velocities)
    np.testing.assert_allclose(hold.points[0].positions, [.03] * 7, atol=1e-6)
    assert bench.change('deactivate')  # nothing is commanded any more, so nothing is said
    assert bench.change('activate')
    step_to(bench, T0 + S, 2)
    assert [stamp_of(t) for t in bench.trajectories] == [T0, 0, T0 + S]


def test_stop_after_a_reset_holds_what_the_robot_still_executes(sim):
    bench = sim()
    bench.send(T0)
    answered(bench)
    bench.send_time(T0 + 2 * DT)
    assert bench.trigger('reset_episode').success and bench.trigger('stop').success
    bench.until(lambda: len(bench.trajectories) == 2, 'the hold')
    np.testing.assert_allclose(positions(bench.trajectories[1]), [[.02] * 7], atol=1e-6)


def test_stop_after_the_clock_moved_back_holds_where_the_robot_is(sim):
    """Of the running trajectory it can no longer be said how far it has come."""
    bench = sim()
    bench.send(T0)
    answered(bench)
    bench.send_time(T0 - S)
    bench.send_joints(T0 - S, (.05,) * 7)
    bench.until(lambda: bench.node._buffer.measured(T0 - S) is not None, 'the joint states')
    assert bench.trigger('stop').success
    bench.until(lambda: len(bench.trajectories) == 2, 'the hold')
    np.testing.assert_allclose(positions(bench.trajectories[1]), [[.05] * 7], atol=1e-6)


def test_deactivate_holds_the_running_command(sim):
    bench = sim()
    bench.send(T0)
    answered(bench)
    bench.send_time(T0 + 20 * DT)  # the chunk has ended long ago: hold where it ended
    assert bench.change('deactivate')
    bench.until(lambda: len(bench.trajectories) == 2, 'the hold')
    np.testing.assert_allclose(positions(bench.trajectories[1]), [[.08] * 7], atol=1e-6)


def test_v15_what_was_moved_by_hand_after_the_chunk_is_neither_held_at_nor_led_back_to_the_old_command(sim):
    """A second after its end the last command says nothing any more of where the robot is."""
    bench = sim(max_step=[0.05])
    bench.send(T0)
    answered(bench)
    step_to(bench, T0 + 3 * S, 2, positions=(.5,) * 7)
    np.testing.assert_allclose(positions(bench.trajectories[1])[0], [.51] * 7, atol=1e-6)
    bench.send_time(T0 + 6 * S)
    bench.send_joints(T0 + 6 * S, (.9,) * 7)
    assert bench.trigger('stop').success and bench.trigger('start').success
    step_to(bench, T0 + 7 * S, 3, positions=(.9,) * 7)  # comes after whatever the stop may have sent
    assert [stamp_of(t) for t in bench.trajectories] == [T0, T0 + 3 * S, T0 + 7 * S]


def test_stop_that_can_tell_the_robot_nothing_says_so(sim):
    bench = sim()
    bench.send(T0)
    answered(bench)
    bench.send_time(T0 - S)  # which forgets command and samples
    answer = bench.trigger('stop')
    assert not answer.success and 'the robot ends its last chunk' in answer.message
    assert not bench.node._worker.running


class Lingering(EchoPolicy):
    """Its second answer is delivered slowly: the inference thread waits, the worker's lock held, until let go."""

    def __init__(self):
        super().__init__()
        self.delivering, self.go_on = threading.Event(), threading.Event()

    def status(self):
        if threading.current_thread().name == 'inference' and len(self.seen) == 2:
            self.delivering.set()
            assert self.go_on.wait(20)
        return super().status()


def test_stop_waits_for_a_chunk_that_is_being_published(sim):
    policy = Lingering()
    bench = sim(policy)
    bench.send(T0)
    answered(bench)
    bench.send_time(T0 + S)
    bench.send(T0 + S)
    bench.until(policy.delivering.is_set, 'the delivery')
    assert not bench.node._worker._changed.acquire(blocking=False)  # which stop() needs, so it has to wait
    stopper = threading.Thread(target=bench.node.stop_calls)
    stopper.start()
    policy.go_on.set()
    stopper.join()
    bench.until(lambda: len(bench.trajectories) == 3, 'the hold')
    assert [stamp_of(t) for t in bench.trajectories] == [T0, T0 + S, 0]


def test_stop_is_the_last_word_whoever_wins_the_race(sim):
    """Each round an answer and a stop meet; the chunk after the next start is the sentinel that ends the round."""
    release = threading.Event()

    def gate(policy):
        if round(policy.seen[-1].stamp_s) % 2:
            assert release.wait(20)

    policy = EchoPolicy(gate=gate)
    bench = sim(policy)
    now, wire = T0, bench.trajectories
    for number in range(12):
        now += 2 * S
        bench.send_time(now)
        bench.send(now)
        bench.until(lambda now=now: wire and stamp_of(wire[-1]) == now, 'the first chunk of the round')
        bench.send_time(now + S)
        bench.send(now + S)
        bench.until(lambda now=now: round(policy.seen[-1].stamp_s * S) == now + S, 'the call that races')
        opener = threading.Timer(0.0005 * (number % 4), release.set)
        opener.start()
        bench.node.stop_calls()
        opener.join()
        bench.until(lambda: not bench.node._worker._busy, 'the end of the call')
        release.clear()
        bench.node.begin_episode()
        bench.node.start_calls()
    bench.send_time(now + 2 * S)
    bench.send(now + 2 * S)
    bench.until(lambda: stamp_of(wire[-1]) == now + 2 * S, 'the last sentinel')
    rounds = [[]]
    for message in wire:  # a round ends with the first chunk of the next one, which has an even second
        if stamp_of(message) and (stamp_of(message) - T0) % (2 * S) == 0:
            rounds.append([])
        rounds[-1].append(stamp_of(message))
    assert len(rounds) == 14 and all(stamps[-1] == 0 for stamps in rounds[1:-1]), rounds
    assert bench.node._worker.discarded + sum(len(stamps) == 3 for stamps in rounds) == 12
