# SPDX-License-Identifier: Apache-2.0
"""The work cell as a robot: what it executes depends on the seed alone, not on how long an answer takes."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import numpy as np
import pytest
from jtc_rules import rejection
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.parameter import Parameter
from robot_bench import EchoPolicy, stamp_message
from std_srvs.srv import Trigger
from trajectory_msgs.msg import JointTrajectory, JointTrajectoryPoint

from rmuscle_core.errors import ObservationError
from rmuscle_ros.node import PolicyNode
from rmuscle_ros.player import TrajectoryPlayer

PERIOD_NS = 40_000_000


def trajectory(stamp_ns, first_ns, rows, names=('a', 'b'), period_ns=PERIOD_NS):
    message = stamp_message(JointTrajectory(joint_names=list(names)), stamp_ns)
    for i, row in enumerate(rows):
        point = JointTrajectoryPoint(positions=[float(v) for v in row])
        point.time_from_start.sec, point.time_from_start.nanosec = divmod(first_ns + i * period_ns, 1_000_000_000)
        message.points.append(point)
    return message


def played(player, start_ns):
    found = []
    while (command := player.command(start_ns + (len(found) + 1) * PERIOD_NS)) is not None:
        found.append(command.tolist())
    return found


def test_points_are_played_in_their_periods_in_our_joint_order():
    player = TrajectoryPlayer(('a', 'b'), PERIOD_NS)
    player.begin_episode(1_000_000_000)
    player.accept(trajectory(1_000_000_000, PERIOD_NS, [(2, 1), (4, 3), (6, 5)], names=('b', 'a')))
    assert player.wait(1_000_000_000, 0.0)
    assert played(player, 1_000_000_000) == [[1, 2], [3, 4], [5, 6]]


def test_late_trajectory_starts_at_its_first_point():
    player = TrajectoryPlayer(('a', 'b'), PERIOD_NS)
    player.begin_episode(1_000_000_000)
    assert not player.wait(1_400_000_000, 0.0)
    player.accept(trajectory(1_000_000_000, PERIOD_NS, [(1, 2), (3, 4)]))
    assert played(player, 1_400_000_000) == [[1, 2], [3, 4]]


def test_trajectory_of_the_episode_before_is_not_played():
    player = TrajectoryPlayer(('a', 'b'), PERIOD_NS)
    player.begin_episode(2_000_000_000)
    player.accept(trajectory(1_990_000_000, PERIOD_NS, [(1, 2), (3, 4)]))
    assert not player.wait(2_000_000_000, 0.0)


def test_foreign_joints_are_refused_by_name():
    with pytest.raises(ObservationError, match='elbow'):
        TrajectoryPlayer(('a', 'b'), PERIOD_NS).accept(trajectory(0, PERIOD_NS, [(1, 2)], names=('a', 'elbow')))


@pytest.mark.parametrize(('rows', 'period_ns', 'problem'), [
    ([(1, 2), (3,)], PERIOD_NS, '2 positions'), ([(1, 2), (3, float('nan'))], PERIOD_NS, 'finite'),
    ([(1, 2), (3, 4)], 0, 'increasing')])
def test_points_that_a_controller_refuses_are_not_played(rows, period_ns, problem):
    player = TrajectoryPlayer(('a', 'b'), PERIOD_NS)
    with pytest.raises(ObservationError, match=problem):
        player.accept(trajectory(0, PERIOD_NS, rows, period_ns=period_ns))
    assert not player.wait(0, 0.0)


class Reach(EchoPolicy):
    """Pulls every joint a little towards zero: motion that depends on all that was observed before."""

    def __init__(self, delay=None):
        super().__init__()
        self.delay = delay
        self.config = SimpleNamespace(cameras=('top', 'left_wrist', 'right_wrist'), state_dim=14, action_dim=14,
                                      chunk_size=16, execute_steps=12)

    def infer(self, observation):
        if self.delay:
            self.delay()
        seen = 1e-3 * observation.images['top'].mean()
        self.gate = lambda _: observation.state * np.linspace(1, 0.9, 16)[:, None] + seen
        return super().infer(observation)


def run_episodes(policy, seeds, namespace):
    from rmuscle_core.workcell.cell import JOINTS
    from rmuscle_ros.cell_node import CellNode
    values = {'checkpoint': 'some/checkpoint', 'prompt': 'transfer cube', 'joint_names': list(JOINTS), 'blend_s': 0.0,
              'cameras': ['top', 'left_wrist', 'right_wrist'], 'use_sim_time': True, 'autostart_episode': True}
    node = PolicyNode(namespace=namespace, parameter_overrides=[Parameter(n, value=v) for n, v in values.items()],
                      config_loader=lambda _: policy.config, policy_factory=lambda *_: policy)
    cell = CellNode(namespace=namespace, parameter_overrides=[Parameter('real_time_factor', value=0.0),
                                                              Parameter('max_steps', value=30)])
    driver, executor = Node('driver', namespace=namespace), SingleThreadedExecutor()
    results, rejected = [], []
    driver.create_subscription(JointTrajectory, 'joint_trajectory', lambda m: rejected.append(rejection(m, JOINTS)), 10)
    run = driver.create_client(Trigger, 'cell_node/run_episode')
    for one in (node, cell, driver):
        executor.add_node(one)
    try:
        assert node.trigger_configure().to_label() == 'transition_success'
        assert node.trigger_activate().to_label() == 'transition_success'
        end = time.monotonic() + 60
        for seed in seeds:
            cell.set_parameters([Parameter('seed', value=seed)])
            while not run.service_is_ready():
                executor.spin_once(timeout_sec=0.02)
            answer = run.call_async(Trigger.Request())
            while not answer.done():
                assert time.monotonic() < end, 'the episode did not end'
                executor.spin_once(timeout_sec=0.02)
            results.append(json.loads(answer.result().message))
    finally:
        node.close()
        cell.close()
        executor.shutdown()
        for one in (node, cell, driver):
            one.destroy_node()
    assert rejected and not any(rejected), rejected
    return results, [o.state for o in policy.seen], policy.resets


def test_equal_seeds_give_equal_motion_however_slow_the_policy_is(ros_context):
    pytest.importorskip('gym_aloha', reason='needs the extra workcell')
    quick = run_episodes(Reach(), [3, 4], '/cell_quick')
    slow = run_episodes(Reach(lambda: time.sleep(0.3)), [3, 4], '/cell_slow')
    for results, seen, resets in (quick, slow):
        assert [r['steps'] for r in results] == [30, 30] and [r['calls'] for r in results] == [3, 3]
        assert len(seen) == 6 and len(resets) == 3  # one reset by activation, one for each episode
        assert all(len(r['gaps_ms']) == 2 for r in results)
    np.testing.assert_array_equal(quick[1], slow[1])
    assert not np.array_equal(quick[1][1], quick[1][4])  # another seed moves otherwise
    assert min(slow[0][0]['gaps_ms']) > 250


def test_a_policy_node_that_never_answers_ends_the_patience(ros_context):
    """As one that was killed with the request in hand."""
    pytest.importorskip('gym_aloha', reason='needs the extra workcell')
    from rmuscle_ros.cell_node import CellNode
    cell = CellNode(namespace='/cell_mute', parameter_overrides=[Parameter('patience_s', value=0.3)])
    driver, mute = (Node(name, namespace='/cell_mute') for name in ('driver', 'mute'))
    mute.create_service(Trigger, 'policy_node/reset_episode', lambda request, response: response)  # nobody spins it
    executor = SingleThreadedExecutor()
    for one in (cell, driver):
        executor.add_node(one)
    try:
        run, end = driver.create_client(Trigger, 'cell_node/run_episode'), time.monotonic() + 60
        while not run.service_is_ready():
            executor.spin_once(timeout_sec=0.02)
        answer = run.call_async(Trigger.Request())
        while not answer.done():
            assert time.monotonic() < end, 'the episode was never given up'
            executor.spin_once(timeout_sec=0.02)
        assert not answer.result().success and 'waited 0.3 s for the policy node' in answer.result().message
    finally:
        cell.close()
        executor.shutdown()
        for one in (cell, driver, mute):
            one.destroy_node()
