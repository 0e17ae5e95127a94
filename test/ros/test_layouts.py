# SPDX-License-Identifier: Apache-2.0
"""What is shipped to look at the node with: every topic, field and service in it is one the node really has."""

from __future__ import annotations

import importlib
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import yaml

from rmuscle_ros.node import PolicyNode

CONFIG = Path(__file__).parents[2] / 'config'


@pytest.fixture
def interface(make_bench):
    """(topic -> type, services) of a configured node in the root namespace, with the robot's own topics."""
    bench = make_bench(namespace='/')
    assert bench.change('configure'), bench.node.last_error
    topics = dict(bench.node.get_topic_names_and_types())
    services = dict(bench.node.get_service_names_and_types_by_node('policy_node', '/'))
    return {topic: types[0] for topic, types in topics.items()}, services


def get_message(kind):
    """The class of a message type, ``package/msg/Name``."""
    package, _, name = kind.split('/')
    return getattr(importlib.import_module(f'{package}.msg'), name)


def field_exists(kind, path):
    """Whether a message type has the field, given as names with indices or filters."""
    for name in path:
        name = re.sub(r'[\[{].*', '', name)
        types = get_message(kind).get_fields_and_field_types()
        if name not in types:
            return False
        kind = re.sub(r'^sequence<([^,>]*).*>$|\[\d*\]$', r'\1', types[name])
        if '/' in kind and kind.count('/') == 1:
            kind = kind.replace('/', '/msg/')
    return True


def panels_of(layout):
    """The panel ids that a Foxglove layout tree shows."""
    return [layout] if isinstance(layout, str) else panels_of(layout['first']) + panels_of(layout['second'])


def test_foxglove_layout_fits_the_node(interface):
    topics, services = interface
    layout = json.loads((CONFIG / 'foxglove/rmuscle.json').read_text())
    panels = layout['configById']
    assert sorted(panels_of(layout['layout'])) == sorted(panels)
    paths = [path['value'] for panel in panels.values() for path in panel.get('paths', ())]
    assert len(paths) > 10
    for path in paths:
        topic, *fields = path.split('.')
        assert topic in topics and field_exists(topics[topic], fields), path
    used = {panel['imageMode']['imageTopic'] for name, panel in panels.items() if name.startswith('Image!')}
    assert used <= set(topics) and panels['DiagnosticSummary!all']['topicToRender'] in topics
    for name, panel in panels.items():
        if name.startswith('CallService!'):
            kind = services[panel['serviceName']][0]
            assert set(json.loads(panel['requestPayload'])) == ({'data'} if kind.endswith('SetBool') else set())


def test_plotjuggler_layout_fits_the_node(interface):
    topics, _ = interface
    root = ElementTree.parse(CONFIG / 'plotjuggler/rmuscle.xml').getroot()
    selected = root.find('Plugins/plugin/selected_topics').get('value').split(';')
    joints = yaml.safe_load((CONFIG / 'ur5e_cell.yaml').read_text())['/**']['ros__parameters']['joint_names']
    curves = [curve.get('name') for curve in root.iter('curve')]
    assert len(curves) > 10 and root.find('tabbed_widget/Tab/Container/DockSplitter/DockArea/plot') is not None
    for curve in curves:
        topic = next(topic for topic in selected if curve.startswith(f'{topic}/'))
        fields = curve[len(topic) + 1:].split('/')
        if topic == '/joint_states':  # PlotJuggler sorts these by joint
            assert fields[0] in joints and fields[1:] == ['position']
        else:
            assert topic in topics and field_exists(topics[topic], fields), curve
    assert set(selected) <= set(topics)
    for splitter in root.iter('DockSplitter'):
        assert int(splitter.get('count')) == len(splitter) == len(splitter.get('sizes').split(';'))


@pytest.mark.parametrize('name', ['ur5e_cell', 'qos'])
def test_example_files_have_only_parameters_of_the_node(ros_context, name):
    arguments = ['--ros-args', '--params-file', str(CONFIG / 'ur5e_cell.yaml'), '--params-file',
                 str(CONFIG / f'{name}.yaml')]
    node = PolicyNode(namespace='/cell_a', cli_args=arguments)
    try:
        options = node._params.node_settings
        unknown = [n for n in node._params.unknown() if not n.startswith('qos_overrides.')]  # declared at configure
        assert not unknown and len(options.joint_names) == len(options.max_step) == 7
        assert node._params.topic('wrist').endswith('/compressed') and not options.autostart_episode
    finally:
        node.close()
        node.destroy_node()


def test_example_qos_reaches_the_subscriptions(make_bench):
    overrides = yaml.safe_load((CONFIG / 'qos.yaml').read_text())['/**']['ros__parameters']['qos_overrides']
    flat = {f'qos_overrides.{topic}.{side}.{policy}': value for topic, sides in overrides.items()
            for side, policies in sides.items() for policy, value in policies.items()}
    bench = make_bench(namespace='/', **flat)
    assert bench.change('configure'), bench.node.last_error
    profiles = {s.topic_name: s.qos_profile for s in bench.node.subscriptions}
    assert profiles['/base/image_raw'].reliability.name == 'RELIABLE' and profiles['/joint_states'].depth == 20
    assert profiles['/wrist/image_raw'].reliability.name == 'BEST_EFFORT'
