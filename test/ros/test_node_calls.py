# SPDX-License-Identifier: Apache-2.0
"""From messages to a policy call and back to a trajectory."""

from __future__ import annotations

import numpy as np
import pytest


def test_joints_are_mapped_by_name_in_any_order(bench):
    bench.activate()
    values = {'j1': .1, 'j2': .2, 'j3': .3, 'j4': .4, 'j5': .5, 'j6': .6, 'gripper': .9, 'foreign': 7.0}
    for order in (['j3', 'j1', 'gripper', 'j2', 'j6', 'j5', 'j4'], ['gripper', 'foreign', 'j6', 'j5', 'j4', 'j3', 'j2', 'j1']):
        seen = len(bench.policy.seen)

        def feed():
            stamp = bench.now_ns()
            bench.send_image('base', stamp, 1)
            bench.send_image('wrist', stamp, 2)
            bench.send_joints(stamp, [values[name] for name in order], order)
            return len(bench.policy.seen) > seen

        bench.until(feed, 'a policy call')
        np.testing.assert_allclose(bench.policy.seen[-1].state, [.1, .2, .3, .4, .5, .6, .9], atol=1e-6)
    bench.until(lambda: len(bench.trajectories) >= 2, 'trajectories')
    assert bench.trajectories[-1].joint_names == ['j1', 'j2', 'j3', 'j4', 'j5', 'j6', 'gripper']
