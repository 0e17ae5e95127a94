# SPDX-License-Identifier: Apache-2.0
"""Parameters: described, checked, atomic, and in effect when they say."""

from __future__ import annotations

import pytest
from rcl_interfaces.srv import DescribeParameters

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
    names = [*own_names(), 'image_topics.base']
    request = DescribeParameters.Request(names=names)
    described = bench.call(DescribeParameters, 'policy_node/describe_parameters', request)
    for one in described.descriptors:
        assert one.description and 'takes effect: ' in one.additional_constraints, one.name
        if one.type in (2, 3):  # integer, double
            assert len(one.integer_range) + len(one.floating_point_range) == 1, one.name


def test_every_double_may_be_written_as_an_integer(node_with):
    doubles = {'token_ratio': 1, 'neuron_ratio': 0, 'control_rate_hz': 30, 'blend_s': 0, 'max_age_s': 1,
               'joint_scale': [1, 2]}
    node = node_with(*(f'{name}:={value}' for name, value in doubles.items()))
    for name, value in doubles.items():
        found = node.get_parameter(name).value
        assert list(found) == value and type(found[0]) is float if isinstance(value, list) else \
            (found == value and type(found) is float), name


@pytest.mark.parametrize(('argument', 'words'), [
    ('control_rate_hz:=fast', ['control_rate_hz', 'number', '1000', 'fast']),
    ('token_ratio:=1.5', ['token_ratio', '1.5']), ('token_ratio:=.nan', ['token_ratio', 'nan']),
    ('slots:=2.5', ['slots', 'integer']), ('mode:=quick', ['mode', 'dense']), ('prompt:=3', ['prompt', 'string']),
    ('joint_names:=7', ['joint_names', 'list']), ('joint_lower:=[.nan]', ['joint_lower']),
    ('send_velocities:=1', ['send_velocities', 'boolean']), ('profile:=[a]', ['profile'])])
def test_bad_value_at_start_is_one_sentence(node_with, argument, words):
    with pytest.raises(SettingsError) as refused:
        node_with(argument)
    assert all(word in str(refused.value) for word in words), refused.value


def test_ratio_set_live_counts_from_the_next_call(bench):
    bench.activate()
    bench.send()
    bench.until(lambda: bench.statuses, 'the first call')
    result, = bench.set(token_ratio=0.125)
    assert result.successful, result.reason
    bench.until(lambda: (bench.send(), len(bench.statuses) > 1)[1], 'the second call')
    before, _ = PROFILES['default']
    assert [s.token_ratio for s in bench.policy.used[:2]] == [before, 0.125]
    assert [s.token_ratio for s in bench.statuses[:2]] == [before, 0.125]
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
