# SPDX-License-Identifier: Apache-2.0
"""Parameters: described, checked, atomic, and in effect when they say."""

from __future__ import annotations

import random
from dataclasses import fields

import pytest
import yaml
from rcl_interfaces.srv import DescribeParameters, GetParameters, ListParameters, SetParameters
from rclpy.parameter import Parameter, parameter_value_to_python

from rmuscle_core.errors import SettingsError
from rmuscle_core.settings import PROFILES, rows
from rmuscle_ros.node import PolicyNode
from rmuscle_ros.params import NodeSettings


@pytest.fixture
def node_with(ros_context):
    """Factory of a bare PolicyNode with command-line arguments."""
    nodes = []

    def make(*arguments):
        nodes.append(PolicyNode(cli_args=['--ros-args', *[w for a in arguments for w in ('-p', a)]]))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()
        node.destroy_node()


def own_names():
    return [*(row.name for row in rows()), *NodeSettings.__dataclass_fields__]


def test_every_parameter_is_described(bench):
    assert bench.change('configure')
    names = bench.call(ListParameters, 'policy_node/list_parameters', ListParameters.Request()).result.names
    assert {*own_names(), 'image_topics.base', 'use_sim_time'} < set(names)
    request = DescribeParameters.Request(names=names)
    described = bench.call(DescribeParameters, 'policy_node/describe_parameters', request)
    for one in described.descriptors:
        assert one.description, one.name
        if one.name not in (*own_names(), 'use_sim_time') and not one.name.startswith('image_topics.'):
            assert one.read_only, one.name  # declared by rclpy: qos_overrides and the like
            continue
        assert 'takes effect: ' in one.additional_constraints, one.name
        if one.type in (2, 3):  # integer, double
            assert len(one.integer_range) + len(one.floating_point_range) == 1, one.name


def whole(row):
    """An integer that the row of a double allows; a list of one for a list of doubles."""
    if isinstance(row.default, tuple):
        return [1]
    return next(v for v in range(1001) if row.metadata['low'] <= v <= row.metadata['high'])


def test_v27_every_double_may_be_written_as_an_integer(node_with):
    tables = [*rows(), *fields(NodeSettings)]
    doubles = {row.name: whole(row) for row in tables if isinstance(row.default, float) or (
        isinstance(row.default, tuple) and isinstance(row.default[0], float))}
    assert {'token_ratio', 'control_rate_hz', 'joint_scale'} < set(doubles)
    node = node_with(*(f'{name}:={value}' for name, value in doubles.items()))
    for again in (False, True):  # at start, and set
        for name, value in doubles.items():
            if again:
                result = node.set_parameters([Parameter(name, value=value)])[0]
                assert result.successful, (name, result.reason)
            found = node.get_parameter(name).value
            found, value = (found, value) if isinstance(value, list) else ([found], [value])
            assert list(found) == value and type(found[0]) is float, name


@pytest.mark.parametrize(('argument', 'words'), [
    ('control_rate_hz:=fast', ['control_rate_hz', 'number', '1000', 'fast']),
    ('token_ratio:=1.5', ['token_ratio', '1.5']), ('token_ratio:=.nan', ['token_ratio', 'nan']),
    ('slots:=2.5', ['slots', 'integer']), ('mode:=quick', ['mode', 'dense']), ('prompt:=3', ['prompt', 'string']),
    ('joint_names:=7', ['joint_names', 'list']), ('joint_lower:=[.nan]', ['joint_lower']),
    ('send_velocities:=1', ['send_velocities', 'boolean']), ('profile:=[a]', ['profile'])])
def test_v27_bad_value_at_start_is_one_sentence(node_with, argument, words):
    with pytest.raises(SettingsError) as refused:
        node_with(argument)
    assert all(word in str(refused.value) for word in words), refused.value


def test_ratio_set_live_counts_from_the_next_call(bench):
    bench.activate()
    bench.send()
    bench.until(lambda: bench.statuses, 'the first call')
    result, = bench.set(token_ratio=0.125)
    assert result.successful, result.reason
    bench.fed_until(lambda: len(bench.statuses) > 1, 'the second call')
    before, _ = PROFILES['default']
    assert [s.token_ratio for s in bench.policy.used[:2]] == [before, 0.125]
    assert [s.token_ratio for s in bench.statuses[:2]] == pytest.approx([before, 0.125])  # float32 on the wire
    assert [v.string_value for v in bench.get('profile')] == ['custom']


def test_integer_for_a_double_and_linked_profile(bench):
    assert bench.set(token_ratio=1)[0].successful
    assert bench.set(profile='fast')[0].successful
    profile, token, neuron = bench.get('profile', 'token_ratio', 'neuron_ratio')
    assert (profile.string_value, token.double_value, neuron.double_value) == ('fast', *PROFILES['fast'])
    assert (bench.node._params.settings.token_ratio, bench.node._params.settings.profile) == (
        PROFILES['fast'][0], 'fast')


@pytest.mark.parametrize(('name', 'value', 'reason'), [
    ('token_ratio', 1.01, 'token_ratio'), ('token_ratio', float('nan'), 'token_ratio'),
    ('mode', 'quick', 'dense, context'),
    ('window', 11, 'window'), ('max_age_s', -1.0, 'max_age_s'), ('token_ratio', 'half', 'DOUBLE')])
def test_refused_with_a_reason(bench, name, value, reason):
    result, = bench.set(**{name: value})
    assert not result.successful and reason in result.reason


def test_one_bad_value_of_an_atomic_set_changes_nothing(bench):
    result, = bench.set(atomically=True, neuron_ratio=0.2, max_age_s=1.0, mode='quick')
    assert not result.successful and 'mode' in result.reason
    assert [v.double_value for v in bench.get('neuron_ratio', 'max_age_s')] == [0.5, 0.5]
    assert bench.node._params.settings.neuron_ratio == 0.5
    result, = bench.set(atomically=True, neuron_ratio=0.2, max_age_s=1.0)
    assert result.successful and bench.node._params.node_settings.max_age_s == 1.0


def test_structural_parameters_are_fixed_while_configured(bench):
    structural = {'checkpoint': 'other', 'slots': 3, 'image_topics.base': '/other', 'joint_names': ['a'],
                  'execute_steps': 4}
    bench.activate()
    for name, value in structural.items():
        result, = bench.set(**{name: value})
        assert not result.successful and name in result.reason and 'configure' in result.reason
    assert bench.change('deactivate') and bench.change('cleanup')
    assert all(result.successful for result in bench.set(**structural))


def dump(bench):
    """The text that ``ros2 param dump`` prints: every parameter below the node's name, split at the dots."""
    names = sorted(bench.call(ListParameters, 'policy_node/list_parameters', ListParameters.Request()).result.names)
    values = bench.call(GetParameters, 'policy_node/get_parameters', GetParameters.Request(names=names)).values
    tree = {}
    for name, value in zip(names, values):
        *folders, leaf = name.split('.')
        place = tree
        for folder in folders:
            place = place.setdefault(folder, {})
        value = parameter_value_to_python(value)
        place[leaf] = value.tolist() if hasattr(value, 'tolist') else value
    return yaml.dump({bench.node.get_fully_qualified_name(): {'ros__parameters': tree}}, default_flow_style=False)


@pytest.mark.parametrize('changes', [
    {}, {'profile': 'fast', 'max_age_s': 1}, {'token_ratio': 0.3},
    {'prompt': 'put the "red" cube: left, #2 of 3 - it\'s 100% {sure}\n' + 'and then some more ' * 9},
    {'prompt': '12', 'neuron_ratio': 0, 'joint_lower': [-1e-05] * 7, 'joint_upper': [1e22] * 7},
    {'image_topics.base': '/front/image_raw/compressed', 'masked_cameras': ['top'], 'mode': 'context'}])
def test_a_dump_loads_back_to_the_same_state(make_bench, tmp_path, changes):
    bench = make_bench(**{f'qos_overrides./dumped/{topic}.subscription.depth': 3 for topic in ('base/image_raw',)},
                       namespace='/dumped')
    assert all(result.successful for result in bench.set(**changes))
    assert bench.change('configure'), bench.node.last_error
    path = tmp_path / 'dump.yaml'
    path.write_text(dump(bench))
    loaded = PolicyNode(namespace='/dumped', cli_args=['--ros-args', '--params-file', str(path)])
    try:
        assert loaded._params.settings == bench.node._params.settings
        assert loaded._params.node_settings == bench.node._params.node_settings
        assert loaded._params.topic('base') == bench.node._params.topic('base')
        assert all(name.startswith('qos_overrides.') for name in loaded._params.unknown())
    finally:
        loaded.close()
        loaded.destroy_node()


def test_a_storm_of_changes_leaves_one_consistent_state(bench):
    """Requests that contradict each other, while the policy is called: each call sees a whole snapshot."""
    draw = random.Random(0)
    choices = [lambda: {'profile': draw.choice([*PROFILES, 'custom', 'none'])}, lambda: {'token_ratio': draw.random()},
               lambda: {'neuron_ratio': draw.choice([0, 1, 2, 0.5])}, lambda: {'mode': draw.choice(['full', 'quick'])},
               lambda: {'profile': 'slow', 'token_ratio': 0.9}, lambda: {'slots': 3}, lambda: {'absent': 1}]
    bench.activate()
    client = bench.robot.create_client(SetParameters, 'policy_node/set_parameters')
    bench.until(client.service_is_ready, 'the service')
    answers = []
    for _ in range(20):
        for _ in range(10):
            values = draw.choice(choices)()
            request = SetParameters.Request(parameters=[Parameter(n, value=v).to_parameter_msg()
                                                        for n, v in values.items()])
            answers.append(client.call_async(request))
        bench.send()
        bench.until(lambda: all(a.done() for a in answers), 'answers')
    bench.fed_until(lambda: len(bench.policy.used) > 3, 'calls in between')
    results = [r for a in answers for r in a.result().results]
    assert {r.successful for r in results} == {True, False} and all(r.successful or r.reason for r in results)
    for used in [*bench.policy.used, bench.node._params.settings]:
        ratios = (used.token_ratio, used.neuron_ratio)
        assert PROFILES.get(used.profile, ratios) == ratios and used.mode == 'full' and used.slots == 12
    names = ('profile', 'token_ratio', 'neuron_ratio', 'mode', 'slots')
    assert [parameter_value_to_python(v) for v in bench.get(*names)] == [
        getattr(bench.node._params.settings, name) for name in names]


def test_v26_a_file_for_another_name_is_ignored_and_configure_says_so(make_bench, tmp_path, ros_context):
    path = tmp_path / 'params.yaml'
    path.write_text('other_node:\n  ros__parameters:\n    checkpoint: here\n')
    node = PolicyNode(namespace='/cell_a', cli_args=['--ros-args', '--params-file', str(path)])
    try:
        node.trigger_configure()
        assert node.state_label == 'unconfigured'
        assert all(name in node.last_error for name in ('checkpoint', 'joint_names', 'cameras', '/**'))
    finally:
        node.close()
        node.destroy_node()


def test_v26_a_misspelled_name_is_told(make_bench, capfd):
    bench = make_bench(max_agee_s=3.0, **{'image_topics.front': '/front'})
    assert bench.change('configure')
    said = capfd.readouterr().err
    assert 'ignored: max_agee_s, image_topics.front' in said or 'ignored: image_topics.front, max_agee_s' in said


def test_v26_a_qos_override_of_no_topic_of_ours_is_told(make_bench, capfd):
    """The names of topics in overrides are the resolved ones, which is easily forgotten in a namespace."""
    fits, lost = (f'qos_overrides.{topic}.subscription.depth' for topic in ('/names/joint_states', '/joint_states'))
    bench = make_bench(namespace='/names', **{fits: 9, lost: 9})
    assert bench.change('configure')
    said = capfd.readouterr().err
    assert f'ignored: {lost}' in said and fits not in said.partition('ignored: ')[2]


@pytest.mark.parametrize(('name', 'value'), [
    ('joint_states.subscription.reliability', 'sometimes'), ('joint_trajectory.publisher.depth', -1),
    ('joint_states.subscription.depth', 'ten')])
def test_a_qos_override_that_cannot_be_is_one_sentence(make_bench, name, value):
    bench = make_bench(namespace='/odd', **{f'qos_overrides./odd/{name}': value})
    assert not bench.change('configure') and bench.state() == 'unconfigured' and bench.policy.closed
    assert bench.node.last_error.startswith(f'{name.partition(".")[0]} cannot be made with its qos_overrides: ')
