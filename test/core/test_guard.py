# SPDX-License-Identifier: Apache-2.0
"""Nothing leaves the guard that a trajectory controller would reject, or that would make the arm jump."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from jtc_rules import rejection

from rmuscle_core.guard import ChunkRefused, Limits, check_trajectory, hold, plan_trajectory, step_times

NAMES = ('j1', 'j2')
OPEN = Limits(*(np.full(2, v) for v in (-np.inf, np.inf, np.inf)))
STAMP, PERIOD = 5_000_000_000, 50_000_000


def ramp(steps=16):
    return np.stack([np.arange(1, steps + 1) / 100, np.arange(1, steps + 1) / -50], axis=1).astype(np.float32)


def plan(actions=None, late_s=0.0, execute_steps=8, **options):
    """Every trajectory that leaves the guard is also shown to the controller's own rules."""
    values = {'limits': OPEN, 'measured': np.zeros(2), **options}
    planned = plan_trajectory(ramp() if actions is None else actions, NAMES, stamp_ns=STAMP, rate_hz=20.0,
                              now_ns=STAMP + round(late_s * 1e9), execute_steps=execute_steps, **values)
    assert not rejection(message_of(planned.trajectory), NAMES, STAMP / 1e9 + late_s)
    return planned


def message_of(trajectory):
    """The trajectory in the shape of a JointTrajectory message, without ROS."""
    def time(ns):
        return SimpleNamespace(sec=ns // 1_000_000_000, nanosec=ns % 1_000_000_000)

    velocities = [()] * len(trajectory.positions) if trajectory.velocities is None else trajectory.velocities
    points = [SimpleNamespace(positions=p, velocities=v, accelerations=(), effort=(), time_from_start=time(t))
              for p, v, t in zip(trajectory.positions, velocities, trajectory.times_ns.tolist())]
    return SimpleNamespace(joint_names=list(trajectory.joint_names), points=points,
                           header=SimpleNamespace(stamp=time(trajectory.stamp_ns)))


def test_first_step_is_one_period_after_the_observation():
    planned = plan()
    trajectory = planned.trajectory
    assert trajectory.times_ns.tolist() == [50_000_000 * i for i in range(1, 9)]
    np.testing.assert_array_equal(trajectory.positions, ramp()[:8].astype(np.float64))
    assert trajectory.stamp_ns == STAMP and trajectory.end_ns == STAMP + 400_000_000
    assert (planned.trimmed, planned.clamped, planned.capped) == (0, 0, 0)


def test_step_times_do_not_drift_at_rates_that_divide_badly():
    assert step_times(300, 30.0)[-1] == 10_000_000_000


@pytest.mark.parametrize(('late_s', 'first'), [(0.0, 0), (0.049, 0), (0.05, 1), (0.33, 6), (0.79, 15)])
def test_v13_past_steps_are_left_out(late_s, first):
    planned = plan(late_s=late_s)
    trajectory = planned.trajectory
    assert planned.trimmed == first
    assert trajectory.times_ns[0] == 50_000_000 * (first + 1)
    assert STAMP + trajectory.times_ns[0] > STAMP + late_s * 1e9
    assert len(trajectory.times_ns) == min(8, 16 - first)


def test_v13_chunk_that_is_over_is_refused_whole():
    with pytest.raises(ChunkRefused, match=r'16 steps .* 0\.95 s') as refused:
        plan(late_s=0.95)
    assert refused.value.kind == 'expired'


def test_v19_one_bad_number_refuses_the_chunk_and_is_named():
    for bad in (np.nan, np.inf):
        actions = ramp()
        actions[3, 1] = bad
        with pytest.raises(ChunkRefused, match='step 3 of joint j2') as refused:
            plan(actions)
        assert refused.value.kind == 'nonfinite'


def test_wrong_shape_is_refused():
    with pytest.raises(ChunkRefused, match=r'\(16, 3\).*j1, j2'):
        plan(np.zeros((16, 3)))


def test_velocities_follow_the_positions_and_end_at_rest():
    velocities = plan().trajectory.velocities
    np.testing.assert_allclose(velocities[:-1], np.tile([0.2, -0.4], (7, 1)), rtol=1e-5)
    assert not velocities[-1].any()
    assert plan(velocities=False).trajectory.velocities is None


def test_limits_clamp_and_count():
    limits = Limits(np.array([-np.inf, -0.11]), np.array([0.055, np.inf]), OPEN.jump)
    planned = plan(limits=limits)
    trajectory = planned.trajectory
    assert trajectory.positions[:, 0].max() == 0.055 and trajectory.positions[:, 1].min() == -0.11
    assert planned.clamped == 3 + 3


def shifted(offset, **options):
    """V15's chunks: a ramp of 1 rad over 16 steps, and the same ramp a little off, ready 6 steps later."""
    step = 1 / 16
    old = plan(np.arange(1, 17)[:, None] * [step, step], execute_steps=16).trajectory
    new = np.arange(1, 17)[:, None] * [step, step] + offset
    return old, new, plan(new, late_s=0.3, execute_steps=16, previous=old, blend_s=0.4, **options).trajectory


def test_v15_chunk_joins_the_running_command_without_a_step():
    old, new, joined = shifted(0.05)
    assert joined.times_ns[0] == 350_000_000
    moves = np.diff(np.vstack([old.at(STAMP + 300_000_000), joined.positions]), axis=0)
    assert np.abs(moves).max() <= 1 / 16 + 0.05 / 8 + 1e-9
    after = joined.times_ns > 300_000_000 + 400_000_000
    assert after.sum() == 2
    np.testing.assert_allclose(joined.positions[after], new[6:][after], atol=1e-3)


def test_v15_blend_s_of_half_a_second_meets_the_case_to_the_digit():
    step = 1 / 16
    old = plan(np.arange(1, 17)[:, None] * [step, step], execute_steps=16).trajectory
    new = np.arange(1, 21)[:, None] * [step, step] + 0.05
    joined = plan(new, late_s=0.3, execute_steps=20, previous=old, blend_s=0.5).trajectory
    moves = np.diff(np.vstack([old.at(STAMP + 300_000_000), joined.positions[:10]]), axis=0)
    assert np.abs(moves).max() <= step + 0.005 + 1e-9
    after = joined.times_ns >= 800_000_000
    assert after.any() and np.abs(joined.positions - new[6:])[after].max() < 1e-3


def test_v15_max_step_bounds_every_step_and_counts():
    limits = replace(OPEN, step=np.array([0.02, np.inf]))
    actions = np.zeros((16, 2))
    actions[2:] = 0.1
    planned = plan(actions, execute_steps=16, limits=limits)
    moves = np.abs(np.diff(np.vstack([[0, 0], planned.trajectory.positions]), axis=0))
    assert moves[:, 0].max() <= 0.02 + 1e-12 and moves[:, 1].max() == 0.1
    assert planned.capped == 4 and planned.clamped == 0
    assert planned.trajectory.positions[-1].tolist() == [0.1, 0.1]  # what was held back is made up


def test_v15_the_first_step_counts_from_the_command_of_this_moment():
    """Half a period is left to the first point, so it may only move half a step."""
    limits = replace(OPEN, step=np.full(2, 0.02))
    planned = plan(np.ones((16, 2)), late_s=0.025, limits=limits, measured=np.full(2, 0.5))
    np.testing.assert_allclose(planned.trajectory.positions[:3, 0], [0.51, 0.53, 0.55])


def test_a_robot_beyond_a_limit_is_led_back_step_by_step():
    limits = Limits(np.full(2, -0.1), np.full(2, 0.1), OPEN.jump, np.full(2, 0.05))
    planned = plan(np.full((16, 2), 0.3), limits=limits, measured=np.full(2, 0.3))
    np.testing.assert_allclose(planned.trajectory.positions[:6, 0], [0.25, 0.2, 0.15, 0.1, 0.1, 0.1], atol=1e-12)


def test_a_limit_further_from_the_robot_than_max_jump_refuses_the_chunk():
    """The policy starts where the robot stands, and holding it at the limit would make a jump of that."""
    limits = Limits(np.full(2, -0.1), np.full(2, 0.1), np.full(2, 0.15))
    with pytest.raises(ChunkRefused, match=r'starts 0\.200 from the running command of joint j1'):
        plan(np.full((16, 2), 0.3), limits=limits, measured=np.full(2, 0.3))
    plan(np.full((16, 2), 0.2), limits=limits, measured=np.full(2, 0.2))


def test_v15_chunk_far_from_the_running_command_is_refused():
    limits = Limits(OPEN.lower, OPEN.upper, np.array([np.inf, 0.3]))
    with pytest.raises(ChunkRefused, match=r'joint j2.*max_jump 0\.300') as refused:
        plan(ramp() + np.float32(0.5), limits=limits)
    assert refused.value.kind == 'boundary'
    plan(ramp() + np.float32(0.2), limits=limits)


def test_hold_is_one_point_from_now_on():
    trajectory = hold(NAMES, np.array([0.3, -0.2]), 20.0)
    check_trajectory(trajectory, NAMES, STAMP)
    assert trajectory.stamp_ns == 0 and trajectory.positions.tolist() == [[0.3, -0.2]]


GOOD = plan().trajectory
BROKEN = {
    'another joint': {'joint_names': ('j1', 'j9')},
    'another order': {'joint_names': ('j2', 'j1')},
    'first time zero': {'times_ns': GOOD.times_ns - GOOD.times_ns[0]},
    'equal times': {'times_ns': np.full(8, 50_000_000)},
    'no points': {'times_ns': GOOD.times_ns[:0], 'positions': GOOD.positions[:0], 'velocities': GOOD.velocities[:0]},
    'end in the past': {'stamp_ns': 1},
    'position missing': {'positions': GOOD.positions[:, :1]},
    'velocity missing': {'velocities': GOOD.velocities[:-1]},
    'infinite position': {'positions': GOOD.positions * np.inf},
    'velocity not a number': {'velocities': np.full((8, 2), np.nan)},
    'still moving': {'velocities': np.ones((8, 2))},
}


@pytest.mark.parametrize('changes', BROKEN.values(), ids=BROKEN)
def test_every_rule_of_the_controller_is_checked(changes):
    check_trajectory(GOOD, NAMES, STAMP)
    with pytest.raises(ChunkRefused) as refused:
        check_trajectory(replace(GOOD, **changes), NAMES, STAMP)
    assert refused.value.kind == 'malformed'


def test_a_chunk_in_the_first_period_of_another_joins_where_the_robot_is_on_its_way():
    """Not where the first point will be: two chunks at once would be a step of twice the limit."""
    far, limits = np.ones((16, 2), np.float32), replace(OPEN, step=np.full(2, 0.1))
    first = plan(far, limits=limits).trajectory
    again = plan(far, limits=limits, previous=first)
    np.testing.assert_allclose(again.trajectory.positions, first.positions)
    np.testing.assert_allclose(first.at(STAMP + 25_000_000), 0.05)


def test_an_observation_that_is_ahead_of_the_clock_tells_the_time():
    """By its stamp the robot is at 0.08, though the clock says that it is still at 0.07."""
    limits = replace(OPEN, step=np.full(2, 0.01))
    running = replace(plan().trajectory, stamp_ns=STAMP - 8 * PERIOD)
    joined = plan(np.zeros((16, 2), np.float32), late_s=-PERIOD / 1e9, limits=limits, previous=running).trajectory
    np.testing.assert_allclose(joined.positions[0], running.at(STAMP) - [0.01, -0.01], atol=1e-9)
