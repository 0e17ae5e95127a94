# SPDX-License-Identifier: Apache-2.0
"""The launch files: their arguments, and that nothing moves a robot unless asked to."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
COMMON = {'namespace': '', 'log_level': 'info', 'checkpoint': '', 'library': '', 'prompt': '', 'params_file': None}
ARGUMENTS = {  # as documented; None: a path below the installed package
    'rmuscle.launch.py': {**COMMON, 'use_sim_time': 'false', 'configure': 'true', 'activate': 'false',
                          'respawn': 'false', 'trajectory_topic': 'joint_trajectory'},
    'workcell.launch.py': COMMON,
}


@pytest.mark.parametrize('name', sorted(ARGUMENTS))
def test_the_source_declares_the_documented_arguments(name):
    tree = ast.parse((ROOT / 'launch' / name).read_text())
    calls = [node for node in ast.walk(tree)
             if isinstance(node, ast.Call) and getattr(node.func, 'id', '') == 'DeclareLaunchArgument']
    declared = {}
    for call in calls:
        options = {keyword.arg: keyword.value for keyword in call.keywords}
        assert options['description'].value
        declared[call.args[0].value] = getattr(options['default_value'], 'value', None)
    assert declared == ARGUMENTS[name]


def test_every_launch_file_is_documented_here():
    assert {path.name for path in (ROOT / 'launch').iterdir() if path.suffix == '.py'} == set(ARGUMENTS)


@pytest.fixture
def policy_actions():
    """Return a function that expands rmuscle.launch.py with arguments into the actions launch would run."""
    launch = pytest.importorskip('launch', reason='launch is not on PyPI: needs a ROS installation')
    pytest.importorskip('launch_ros', reason='launch_ros is not on PyPI: needs a ROS installation')

    def expand(**given):
        context = launch.LaunchContext()
        context.launch_configurations.update(given)
        description = runpy.run_path(str(ROOT / 'launch' / 'rmuscle.launch.py'))['generate_launch_description']()
        actions = []
        for entity in description.entities:
            actions += entity.visit(context) or []
        return context, actions
    return expand


def handlers_that_run(actions, context):
    from launch.actions import RegisterEventHandler
    return [type(a.event_handler).__name__ for a in actions
            if isinstance(a, RegisterEventHandler) and a.condition.evaluate(context)]


def test_by_default_the_node_is_configured_and_not_activated(policy_actions):
    context, actions = policy_actions(params_file='/dev/null')
    assert handlers_that_run(actions, context) == ['OnProcessStart']


def test_activate_is_asked_for(policy_actions):
    context, actions = policy_actions(params_file='/dev/null', activate='true')
    assert handlers_that_run(actions, context) == ['OnStateTransition', 'OnProcessStart']


def test_empty_arguments_keep_the_parameter_file(policy_actions):
    from launch_ros.utilities import evaluate_parameters
    context, actions = policy_actions(params_file='/dev/null', prompt='12')
    _, overrides = evaluate_parameters(context, actions[-1]._Node__parameters)
    assert overrides == {'prompt': '12', 'use_sim_time': False}  # the prompt stays text
