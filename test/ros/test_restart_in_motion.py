# SPDX-License-Identifier: Apache-2.0
"""What begins anew while the robot is still moving by the last chunk joins that motion."""

from __future__ import annotations

import numpy as np
import pytest
from robot_bench import EchoPolicy
from test_node_calls import DT, T0, Gate, answered, positions

MOTION = 0.05 * np.arange(1, 17, dtype=np.float32)[:, None].repeat(7, axis=1)


@pytest.mark.parametrize('service', ['reset_episode', 'start'])
def test_the_next_chunk_starts_from_where_the_robot_is_by_then_not_from_where_it_was_seen(sim, service):
    gate = Gate(held={1})
    bench = sim(EchoPolicy(gate=lambda policy: MOTION if len(policy.seen) == 1 else gate(policy)), max_step=[0.05])
    bench.send(T0)
    answered(bench)
    assert bench.trigger(service).success
    bench.send_time(T0 + 4 * DT)
    bench.send(T0 + 4 * DT, positions=(0.2,) * 7)
    bench.until(lambda: gate.entered, 'the second call')
    bench.send_time(T0 + 6 * DT)  # the robot moves on to 0.3
    gate.open()
    answered(bench, 2)
    np.testing.assert_allclose(positions(bench.trajectories[1])[0], 0.25, atol=1e-6)  # as near to 0.23 as it can be


def test_after_the_clock_was_set_back_the_robot_is_where_it_is_measured(sim):
    bench = sim(EchoPolicy(gate=lambda policy: MOTION if len(policy.seen) == 1 else None), max_step=[0.05])
    bench.send(T0)
    answered(bench)
    bench.send_time(T0 + 4 * DT)
    bench.send_time(T0 + 2 * DT)
    bench.send(T0 + 2 * DT, positions=(0.2,) * 7)
    answered(bench, 2)
    np.testing.assert_allclose(positions(bench.trajectories[1])[0], 0.21, atol=1e-6)
