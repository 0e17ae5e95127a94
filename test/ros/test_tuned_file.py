# SPDX-License-Identifier: Apache-2.0
"""What ``rmuscle tune`` writes is a parameter file of the policy node, at start and while it runs."""

import pytest
import yaml

from rmuscle_core.tuning.choose import Choice
from rmuscle_core.tuning.commands import write_yaml
from rmuscle_ros.node import PolicyNode

CHOICE = Choice(token_ratio=0.15, neuron_ratio=0.65, window=2, error=0.01, bound=0.02, milliseconds=9.0,
                index=(0, 0, 0))


@pytest.fixture
def tuned(tmp_path):
    write_yaml(tmp_path / 'tuned.yaml', CHOICE, 0.03, '0.0116')
    return tmp_path / 'tuned.yaml'


def chosen(settings):
    return settings.token_ratio, settings.neuron_ratio, settings.window, settings.profile


def test_the_node_starts_with_it_in_any_namespace(tuned, ros_context):
    node = PolicyNode(namespace='/cell_a', cli_args=['--ros-args', '--params-file', str(tuned)])
    try:
        assert node._params.unknown() == [] and chosen(node._params.settings) == (0.15, 0.65, 2, 'custom')
    finally:
        node.close()
        node.destroy_node()


def test_a_configured_node_takes_every_line_of_it(tuned, make_bench):
    """As ``ros2 param load`` does, which sets them in the order of the file."""
    bench = make_bench()
    assert bench.change('configure'), bench.node.last_error
    values = yaml.safe_load(tuned.read_text())['/**']['ros__parameters']
    assert all(result.successful for result in bench.set(**values))
    assert chosen(bench.node._params.settings) == (0.15, 0.65, 2, 'custom')
