# SPDX-License-Identifier: Apache-2.0
"""Nothing leaves the guard that a trajectory controller would reject, or that would make the arm jump."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rmuscle_core.guard import ChunkRefused, Limits, check_trajectory, hold, plan_trajectory, step_times

NAMES = ('j1', 'j2')
OPEN = Limits(*(np.full(2, v) for v in (-np.inf, np.inf, np.inf)))
STAMP = 5_000_000_000


def ramp(steps=16):
    return np.stack([np.arange(1, steps + 1) / 100, np.arange(1, steps + 1) / -50], axis=1).astype(np.float32)


def plan(actions=None, late_s=0.0, execute_steps=8, **options):
    values = {'limits': OPEN, 'measured': np.zeros(2), **options}
    return plan_trajectory(ramp() if actions is None else actions, NAMES, stamp_ns=STAMP, rate_hz=20.0,
                           now_ns=STAMP + round(late_s * 1e9), execute_steps=execute_steps, **values)


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
def test_past_steps_are_left_out(late_s, first):
    planned = plan(late_s=late_s)
    trajectory = planned.trajectory
    assert planned.trimmed == first
    assert trajectory.times_ns[0] == 50_000_000 * (first + 1)
    assert STAMP + trajectory.times_ns[0] > STAMP + late_s * 1e9
    assert len(trajectory.times_ns) == min(8, 16 - first)


def test_chunk_that_is_over_is_refused_whole():
    with pytest.raises(ChunkRefused, match=r'16 steps .* 0\.95 s') as refused:
        plan(late_s=0.95)
    assert refused.value.kind == 'expired'


def test_one_bad_number_refuses_the_chunk_and_is_named():
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


def test_chunk_joins_the_running_command_without_a_step():
    step = 1 / 16
    old = plan(np.arange(1, 17)[:, None] * [step, step], execute_steps=16).trajectory
    new = np.arange(1, 17)[:, None] * [step, step] + 0.05
    joined = plan(new, late_s=0.3, execute_steps=16, previous=old, blend_s=0.5).trajectory
    assert joined.times_ns[0] == 350_000_000
    before = old.at(STAMP + 300_000_000)
    moves = np.diff(np.vstack([before, joined.positions]), axis=0)
    assert np.abs(moves).max() <= step + 0.005 + 1e-6
    np.testing.assert_allclose(joined.positions[-1], new[-1], atol=1e-3)


def test_chunk_far_from_the_running_command_is_refused():
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
