# SPDX-License-Identifier: Apache-2.0
"""A short soak: the node as a process, a few faults of each sort, everything that bench/soak checks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[2] / 'bench/soak'
FAULTS = ('camera lost', 'clock set back', 'episode storm', 'killed')


@pytest.mark.slow
def test_a_node_with_faults_moves_the_robot_safely_recovers_and_loses_nothing(tmp_path):
    options = [f'--fault={name}' for name in FAULTS]
    ran = subprocess.run([sys.executable, SOAK, '--minutes', '0.1', '--factor', '6', '--seed', '1', '--json',
                          tmp_path / 'found.json', *options], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads((tmp_path / 'found.json').read_text())
    assert set(found['recovery_s']) == set(FAULTS) and found['trajectories'] > 20
    assert found['library']['saved'] >= 2 and found['process']['exit_codes'] == [-9, 0]


def test_the_robot_of_the_soak_objects(monkeypatch):
    """A judge that objects to nothing would find nothing."""
    pytest.importorskip('trajectory_msgs')
    monkeypatch.syspath_prepend(str(SOAK))
    import robot as judge
    from builtin_interfaces.msg import Duration, Time
    from trajectory_msgs.msg import JointTrajectory, JointTrajectoryPoint

    def objections(first, then, stamp=10, last_velocity=0.0):
        robot = judge.Robot(12.5, 0)
        message = JointTrajectory(joint_names=list(judge.JOINTS))
        message.header.stamp = Time(sec=stamp)
        for i, place in enumerate((first, then)):
            message.points.append(JointTrajectoryPoint(
                positions=[home + place for home in judge.HOME], velocities=[last_velocity * i] * len(judge.JOINTS),
                time_from_start=Duration(nanosec=80_000_000 * (i + 1))))
        robot.receive(message, 10.0, excuse=False)
        robot.move(10.08)
        return ' '.join(robot.objections)
    assert objections(0.1, 0.2) == ''
    assert 'allowed' in objections(0.3, 0.3) and 'within a trajectory' in objections(0.1, 0.4)
    assert 'beyond the limit' in objections(0.1, 5.0) and 'not finite' in objections(0.1, float('nan'))
    assert 'ends in the past' in objections(0.1, 0.2, stamp=5) and 'ahead' in objections(0.1, 0.2, stamp=20)
    assert 'not zero' in objections(0.1, 0.2, last_velocity=1.0)
