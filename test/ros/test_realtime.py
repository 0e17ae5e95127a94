# SPDX-License-Identifier: Apache-2.0
"""Real-time chunking in the node: what is left over, when the next call is due, and that nothing is blended twice."""

from __future__ import annotations

import threading
from itertools import pairwise

import numpy as np
from robot_bench import EchoPolicy
from test_node_calls import DT, T0, Gate, answered, positions, stamp_of, times


def test_real_time_chunks_follow_the_running_one(sim):
    """Two steps of delay: the next observation is due two steps early, and the leftover is what was commanded."""
    delays = iter([0, 2, 2, 2])

    def think(policy):
        bench.thinking = True
        assert bench.go.wait(20)
        bench.go.clear()

    policy = EchoPolicy(gate=think)
    bench = sim(policy, rtc='exp', blend_s=0.5)
    bench.go, now, worker = threading.Event(), T0, bench.node._worker
    for number in range(4):
        bench.thinking = False
        bench.send_time(now)
        bench.send(now, positions=(.01 * number,) * 7)
        bench.until(lambda: bench.thinking, 'the call')
        delay = next(delays)
        bench.send_time(now + delay * DT)
        bench.go.set()
        answered(bench, number + 1)
        first, trajectory = delay, bench.trajectories[-1]
        assert stamp_of(trajectory) == now and times(trajectory) == [DT * i for i in range(first + 1, 17)]
        if number:  # guided: what the policy says goes out as it is, with no second blending
            expected = .01 * number + .01 * np.arange(first + 1, 17)
            np.testing.assert_allclose(positions(trajectory)[:, 0], expected, atol=1e-6)
        bench.until(lambda: not worker._busy, 'the end of the call')
        measured = max([0, 2, 2, 2][1:number + 1], default=0)
        now += (first + 8 - measured) * DT
        assert worker._not_before_ns == now
    assert policy.leftovers[0] is None
    assert [len(left.actions) for left in policy.leftovers[1:]] == [8, 8, 8]
    assert [left.executed for left in policy.leftovers[1:]] == [0, 2, 2]
    np.testing.assert_allclose(policy.leftovers[2].actions[:, 0], .01 + .01 * np.arange(9, 17), atol=1e-6)


def test_a_chunk_that_comes_after_the_running_one_has_ended_is_blended_all_the_same(sim):
    """The robot has stopped there, and the chunk was computed to move on."""
    gate = Gate(held={2})
    bench = sim(EchoPolicy(gate=gate), rtc='exp', blend_s=0.5)
    bench.send(T0)
    answered(bench)
    bench.send_time(T0 + 8 * DT)
    bench.send(T0 + 8 * DT, positions=(.3,) * 7)
    bench.until(lambda: gate.entered == 2, 'the second call')
    bench.send_time(T0 + 18 * DT)  # the first chunk ended at 16 DT, at 0.16
    gate.open()
    answered(bench, 2)
    assert bench.policy.leftovers[1] is not None
    np.testing.assert_allclose(positions(bench.trajectories[1])[0], .41 - .9 * (.41 - .16), atol=1e-6)


def test_real_time_chunking_starts_free_after_a_stop(sim):
    bench = sim(rtc='linear')
    bench.send(T0)
    answered(bench)
    assert bench.trigger('stop').success and bench.trigger('start').success
    bench.send_time(T0 + 4 * DT)
    bench.send(T0 + 4 * DT)
    answered(bench, 2)
    assert bench.policy.leftovers == [None, None]


def test_a_real_policy_continues_its_running_chunk(sim, checkpoint):
    """Cached and dense calls alike: where the running chunk goes on, the next is nearer to it than without."""
    jumps = {}
    for rtc in ('off', 'exp'):
        bench = sim(real=True, checkpoint=str(checkpoint), device='cpu', slots=4, rtc=rtc, call_lead_s=0.2)
        now = T0
        for number in range(4):
            bench.send_time(now)
            bench.send(now, positions=(.3 * number,) * 7)
            answered(bench, number + 1)
            worker = bench.node._worker
            bench.until(lambda worker=worker: not worker._busy, 'the end of the call')
            now = worker._not_before_ns
        found = [np.reshape(chunk.actions, (16, 7)) for chunk in bench.chunks]
        step = (stamp_of(bench.chunks[1]) - T0) // DT
        jumps[rtc] = [np.abs(after[0] - before[step]).max() for before, after in pairwise(found)]
    assert max(jumps['exp']) < 0.5 * max(jumps['off']), jumps
