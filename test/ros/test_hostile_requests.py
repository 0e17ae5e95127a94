# SPDX-License-Identifier: Apache-2.0
"""Whatever a client asks for, the node answers and lives."""

from __future__ import annotations

import pytest
from rcl_interfaces.msg import Parameter, ParameterValue
from rcl_interfaces.srv import SetParameters, SetParametersAtomically


@pytest.mark.parametrize('kind', [SetParameters, SetParametersAtomically])
def test_a_value_of_a_type_that_does_not_exist_does_not_end_the_node(bench, kind):
    service = 'set_parameters' if kind is SetParameters else 'set_parameters_atomically'
    request = kind.Request(parameters=[Parameter(name='prompt', value=ParameterValue(type=77))])
    assert bench.call(kind, f'policy_node/{service}', request) == kind.Response()
    assert '77' in bench.node.last_error
    assert bench.set(prompt='sort')[0].successful


def test_a_service_that_fails_answers_all_the_same(bench, monkeypatch):
    bench.activate()
    with monkeypatch.context() as patch:
        patch.setattr(bench.node, 'stop_calls', lambda: 1 / 0)
        assert not bench.trigger('stop').success
    assert 'ZeroDivisionError' in bench.node.last_error
    assert bench.trigger('stop').success
