# SPDX-License-Identifier: Apache-2.0
"""Between the policy's chunk and the wire: what is bent and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml
from robot_bench import EchoPolicy
from test_node_calls import DT, T0, Gate, S, answered, diagnosis, positions, stamp_of, step_to, times

from rmuscle_core.processing.normalize import Normalizer
from rmuscle_core.processing.units import unit_problem


def values_of(entry):
    return {v.key: v.value for v in entry.values}


def test_v13_steps_left_out_are_counted(sim):
    gate = Gate(held={1})
    bench = sim(EchoPolicy(gate=gate))
    bench.send(T0)
    bench.until(lambda: gate.entered, 'the call')
    bench.send_time(T0 + 330_000_000)
    gate.open()
    answered(bench)
    assert stamp_of(bench.trajectories[0]) + times(bench.trajectories[0])[0] > T0 + 330_000_000
    assert bench.node._output.trimmed == 6
    diagnosis(bench, 'policy', lambda s: values_of(s)['steps_trimmed'] == '6')


def test_v15_far_chunk_is_refused_and_the_running_one_goes_on(sim):
    bench = sim(max_jump=[0.3])
    bench.send(T0)
    answered(bench)
    for now, place in ((T0 + S, .58), (T0 + 2 * S, .1)):  # .5 from the last command, .08; then near it
        bench.send_time(now)
        bench.send(now, positions=(place,) * 7)
        if place > .5:
            found = diagnosis(bench, 'policy', lambda s: values_of(s)['boundary_rejected'] == '1')
            assert found.level == b'\x02' and 'max_jump 0.300' in found.message
    answered(bench, 2)
    assert [stamp_of(t) for t in bench.trajectories] == [T0, T0 + 2 * S] and bench.node._worker.running


def test_v15_steps_are_bounded_on_the_wire_and_counted(sim):
    bench = sim(EchoPolicy(gate=lambda policy: np.ones((16, 7), np.float32)), max_step=[0.05])
    bench.send(T0)
    answered(bench)
    np.testing.assert_allclose(positions(bench.trajectories[0])[:, 0], 0.05 * np.arange(1, 9), atol=1e-9)
    diagnosis(bench, 'policy', lambda s: values_of(s)['values_capped'] == '56')


def test_v16_relative_motion_is_added_to_the_state_that_was_seen(sim):
    """The robot moves by 0.2 while the policy works; its answer is not moved along."""
    gate = Gate(held={1})
    bench = sim(EchoPolicy(gate=gate))
    bench.send(T0, positions=(.1,) * 7)
    bench.until(lambda: gate.entered, 'the call')
    bench.send_time(T0 + 2 * DT)
    bench.send(T0 + 2 * DT, positions=(.3,) * 7)
    bench.until(lambda: bench.node._buffer.measured(T0 + 2 * DT)[0] == .3, 'the motion')
    gate.open()
    answered(bench)
    np.testing.assert_allclose(positions(bench.trajectories[0])[:, 0], .1 + .01 * np.arange(3, 11), atol=1e-6)


@pytest.mark.parametrize(('parameters', 'words'), [
    ({'horizon': 8}, ['horizon is 8', '16']), ({'action_mode': 'relative'}, ['action_mode is relative', 'absolute'])])
def test_v16_conflict_with_the_checkpoint_refuses_configure(make_bench, parameters, words):
    bench = make_bench(**parameters)
    assert not bench.change('configure') and bench.state() == 'unconfigured'
    assert all(word in bench.node.last_error for word in words), bench.node.last_error
    assert bench.policy.closed or not bench.loaded
    assert all(r.successful for r in bench.set(horizon=16, action_mode='absolute'))
    assert bench.change('configure')


def test_v17_gripper_is_mapped_both_ways_and_clamped(sim):
    infinite, six = float('inf'), [0.0] * 6
    policy = EchoPolicy(gate=lambda _: np.tile(np.float32([*six, 1.3]), (16, 1)))
    bench = sim(policy, joint_lower=[*[-infinite] * 6, 0.0], joint_upper=[*[infinite] * 6, 0.08],
                policy_at_lower=[*[-infinite] * 6, 1.0], policy_at_upper=[*[infinite] * 6, 0.0])
    bench.send(T0, positions=[*six, 0.06])
    answered(bench)
    assert policy.seen[0].state[-1] == pytest.approx(0.25)
    assert positions(bench.trajectories[0])[:, -1].tolist() == [0.0] * 8
    diagnosis(bench, 'policy', lambda s: values_of(s)['values_clamped'] == '8')


class DegreePolicy(EchoPolicy):
    """Trained on joints between -120 and 120 degrees."""

    def unit_problem(self, state, names, declared):
        trained = Normalizer('QUANTILES', np.full(7, -120, np.float32), np.full(7, 120, np.float32))
        return unit_problem(state, trained, names, declared)


def test_v18_radians_for_a_policy_in_degrees_refuse_activation(make_bench):
    bench = make_bench(DegreePolicy())
    assert bench.change('configure')
    bench.until(lambda: (bench.send(positions=(1.2,) * 7), bench.node._buffer.measured(bench.now_ns()) is not None)[1],
                'the joint states')
    assert not bench.change('activate') and bench.state() == 'inactive'
    assert 'looks like degrees' in bench.node.last_error and 'joint j1' in bench.node.last_error
    assert bench.change('cleanup') and bench.set(joint_units=['deg'])[0].successful
    bench.activate()
    bench.until(lambda: (bench.send(positions=(np.pi / 2,) * 7), bench.trajectories)[1], 'a chunk')
    assert bench.policy.seen[0].state[0] == pytest.approx(90, abs=1e-4)
    assert positions(bench.trajectories[0])[0, 0] == pytest.approx(np.radians(90.01), abs=1e-6)


def test_v18_first_observation_after_activation_is_checked_too(sim):
    bench = sim(DegreePolicy())
    bench.send(T0, positions=(1.2,) * 7)
    found = diagnosis(bench, 'policy', lambda s: 'looks like degrees' in s.message)
    assert found.level == b'\x02' and not bench.policy.seen
    step_to(bench, T0 + S, 1, positions=(28.0,) * 7)
    step_to(bench, T0 + 2 * S, 2, positions=(1.2,) * 7)  # a later state near zero is one
    assert [stamp_of(t) for t in bench.trajectories] == [T0 + S, T0 + 2 * S]


def test_v19_chunk_five_is_not_published_and_chunk_four_is_executed_to_its_end(sim):
    def gate(policy):
        return np.full((16, 7), np.nan, np.float32) if len(policy.seen) == 5 else None

    bench = sim(EchoPolicy(gate=gate))
    for number in range(4):
        step_to(bench, T0 + number * S, number + 1)
    bench.send_time(T0 + 4 * S)
    bench.send(T0 + 4 * S)
    diagnosis(bench, 'policy', lambda s: values_of(s)['chunks_nonfinite'] == '1')
    np.testing.assert_allclose(bench.node._output._previous.at(T0 + 4 * S), [.08] * 7, atol=1e-6)
    step_to(bench, T0 + 5 * S, 5)
    assert [stamp_of(t) for t in bench.trajectories] == [T0 + n * S for n in (0, 1, 2, 3, 5)]


def test_v20_nothing_moves_while_a_call_is_stalled_nor_when_it_returns(sim):
    gate = Gate(held={2})
    bench = sim(EchoPolicy(gate=gate), stall_timeout_s=0.2)
    bench.send(T0)
    answered(bench)
    bench.send_time(T0 + S)
    bench.send(T0 + S)
    diagnosis(bench, 'policy', lambda s: 'stalled' in s.message and s.level == b'\x02')
    gate.open()
    bench.until(lambda: bench.node._worker.discarded == 1, 'the late answer')
    step_to(bench, T0 + 2 * S, 2)
    assert [stamp_of(t) for t in bench.trajectories] == [T0, T0 + 2 * S]


def test_v21_standing_still_is_no_reason_to_skip_a_call(sim):
    bench = sim(EchoPolicy(gate=lambda policy: np.zeros((16, 7), np.float32)))
    for number in range(5):
        step_to(bench, T0 + number * 8 * DT, number + 1)
    assert [round(o.stamp_s * S) for o in bench.policy.seen] == [T0 + n * 8 * DT for n in range(5)]


def test_v22_prompt_of_another_type_is_refused(bench):
    result, = bench.set(prompt=3)
    assert not result.successful and 'STRING' in result.reason
    assert bench.get('prompt')[0].string_value == 'lift'


def test_example_for_the_controller_sets_what_chunks_need():
    text = (Path(__file__).parents[2] / 'config' / 'jtc_example.yaml').read_text()
    controller = yaml.safe_load(text)['arm_controller']['ros__parameters']
    assert controller['interpolate_from_desired_state'] is True and controller['allow_trajectory_replacement'] is True
    assert controller['allow_nonzero_velocity_at_trajectory_end'] is False
    assert controller['allow_partial_joints_goal'] is False
    assert controller['cmd_timeout'] > controller['constraints']['goal_time']  # else it is ignored
