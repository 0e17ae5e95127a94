# SPDX-License-Identifier: Apache-2.0
"""V22: another instruction while a call is under way. Its answer belongs to the instruction before."""

from __future__ import annotations

import pytest
from robot_bench import EchoPolicy
from std_msgs.msg import String
from test_node_calls import T0, Gate, S, answered, stamp_of

from rmuscle_ros.topics import PROMPT


@pytest.mark.parametrize('by', ['topic', 'parameter'])
def test_v22_the_answer_to_the_instruction_before_does_not_move_the_robot(sim, by):
    gate = Gate(held={1})
    bench = sim(EchoPolicy(gate=gate))
    bench.send(T0)
    bench.until(lambda: gate.entered, 'the call')
    if by == 'topic':
        bench.robot.create_publisher(String, 'prompt', PROMPT).publish(String(data='put it down'))
        bench.until(lambda: bench.node._prompt() == 'put it down', 'the instruction')
    else:
        assert bench.set(prompt='put it down')[0].successful
    gate.open()
    bench.until(lambda: bench.node._worker.discarded == 1, 'the late answer')
    bench.send_time(T0 + S)
    bench.send(T0 + S)
    answered(bench)
    assert [o.prompt for o in bench.policy.seen] == ['lift', 'put it down']
    assert [stamp_of(t) for t in bench.trajectories] == [T0 + S]


def test_the_same_instruction_again_drops_nothing(sim):
    gate = Gate(held={1})
    bench = sim(EchoPolicy(gate=gate))
    bench.send(T0)
    bench.until(lambda: gate.entered, 'the call')
    bench.robot.create_publisher(String, 'prompt', PROMPT).publish(String(data='lift'))
    bench.until(lambda: bench.node._said == 'lift', 'the instruction')
    assert bench.set(prompt='lift', max_age_s=1.0)[0].successful
    gate.open()
    answered(bench)
    assert bench.node._worker.discarded == 0
