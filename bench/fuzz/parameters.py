# SPDX-License-Identifier: Apache-2.0
"""Parameters of the policy node: any value by service, any parameter file at start and when bags are read.

Needs ROS; without it only the targets of files remain.
"""

from __future__ import annotations

import array
import functools
import math
import random
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from rmuscle_core.errors import RMuscleError, SettingsError
from rmuscle_core.importing.robot import read_robot, read_settings
from rmuscle_core.settings import Settings, rows

ROOT = Path(__file__).parents[2]
INT64 = 2**63 - 1
NUMBERS = (0, 1, -1, 2, 0.5, 12, 1000, INT64, -INT64 - 1, 0.0, -0.0, 1e-320, 1e308, math.nan, math.inf, -math.inf)
TEXTS = ('', 'full', 'off', 'exp', 'custom', 'fast', 'cuda', 'deg', 'same', 'now', '~/x', '/a//b', 'ümlaut', '\x7f',
         'a b', 'top/compressedDepth', 'x' * 3000, '\n', '%s%n{}', '~{sub}')
YAML_ONLY = (None, 10**400, -10**30, {}, [], [[]], {'a': {'b': 1}}, [1, 'a'], [1, 2.5], [None], b'\xff\0', '2020-01-01')
JUNK = ('\t', '\0', '"', "'", ': ', '- ', '&a ', '*a', '!!binary ', '!!python/object:os.system ', '{', ']', '---\n',
        '%', '\\', '\xff', '<<: *a\n', '.inf', '2020-01-01', '1e999', '0x7fffffffffffffffff', '~')


def targets() -> dict[str, Callable]:
    """Name -> target."""
    found: dict[str, Callable] = {'parameters: file read with a bag': robot_file}
    if find_spec('rclpy') and find_spec('rmuscle'):
        found |= {'parameters: values': value, 'parameters: requests': request,
                  'parameters: file at start': node_file}
    return found


def plain(rng: random.Random) -> Any:
    """A value of any of the types that ROS parameters have."""
    def some(values: tuple) -> list:
        return [rng.choice(values) for _ in range(rng.choice((0, 1, 2, 14, 300)))]
    return rng.choice((
        lambda: rng.choice(NUMBERS), lambda: rng.choice(NUMBERS), lambda: rng.choice((True, False)),
        lambda: rng.choice(TEXTS), lambda: some(TEXTS), lambda: [float(v) for v in some(NUMBERS)],
        lambda: [int(v) for v in some((0, 1, -1, INT64))], lambda: some((True, False)),
        lambda: [bytes([rng.randrange(256)]) for _ in range(3)], lambda: rng.uniform(-2, 2), lambda: None))()


def in_table(row: Any, now: Any) -> None:
    """A value as the node keeps it: of the row's type, within its range, one of its choices."""
    default, meta = row.default, row.metadata
    assert type(now) is type(default), (row.name, now)
    if isinstance(default, tuple):
        assert now and all(type(v) is type(default[0]) and v == v for v in now), (row.name, now)
    elif meta['choices']:
        assert now in meta['choices'], (row.name, now)
    elif type(default) in (int, float):
        assert meta['low'] <= now <= meta['high'], (row.name, now)


@functools.lru_cache(maxsize=1)
def table() -> dict[str, Any]:
    from dataclasses import fields

    from rmuscle_ros.params import NodeSettings
    return {row.name: row for row in (*rows(), *fields(NodeSettings))}


def value(rng: random.Random) -> None:
    """The check of a single value."""
    from rmuscle_ros.params import coerce
    row, given = rng.choice(list(table().values())), plain(rng)
    if isinstance(given, list) and given and type(given[0]) in (int, float):
        given = rng.choice((list, tuple, lambda v: array.array('d', v)))(given)  # rclpy gives arrays
    try:
        now = coerce(row, given)
    except SettingsError:
        return
    in_table(row, now)


class Subject:
    """A node that has the policy node's parameters and nothing else."""

    def __init__(self, arguments: list[str] | None = None) -> None:
        import rclpy

        from rmuscle_ros.lifecycle import RetryableLifecycleNode
        from rmuscle_ros.params import NodeParameters
        if not rclpy.ok():
            rclpy.init()
        self.locked, self.complaints = False, []
        self.node = RetryableLifecycleNode('policy_node', namespace='/fuzz', cli_args=arguments, enable_rosout=False)
        try:
            self.node.complain = lambda error, *_: self.complaints.append(error)
            self.parameters = NodeParameters(self.node, lambda: self.locked, lambda: None)
        except BaseException:
            self.node.destroy_node()
            raise

    def check(self) -> None:
        """What is kept is in the table, and is what a client reads."""
        kept = {**vars(self.parameters.settings), **vars(self.parameters.node_settings)}
        for name, row in table().items():
            in_table(row, kept[name])
            told = self.node.get_parameter(name).value
            assert (list(kept[name]) == list(told)) if isinstance(kept[name], tuple) else kept[name] == told, name


@functools.lru_cache(maxsize=1)
def subject() -> Subject:
    return Subject()


def request(rng: random.Random) -> None:
    """Requests of the parameter services, as any client may send them."""
    from rcl_interfaces.msg import Parameter as Message
    from rclpy.parameter import Parameter
    known = subject()
    known.locked, known.complaints[:] = rng.random() < 0.3, []
    messages, foreign = [], False
    for _ in range(rng.randint(0, 4)):
        name = rng.choice((*table(), *table(), 'use_sim_time', 'image_topics.top', 'no.such', '', 'qos_overrides./x',
                           'ä' * 99))
        try:
            messages.append(Parameter(name, value=plain(rng)).to_parameter_msg())
        except (ValueError, TypeError):  # rclpy has no type for it
            messages.append(Message(name=name))
        if rng.random() < 0.1:
            messages[-1].value.type = rng.randrange(256)
            foreign = foreign or messages[-1].value.type > 9
    which = rng.choice(('set_parameters', 'set_parameters_atomically', 'get_parameters', 'describe_parameters',
                        'get_parameter_types'))
    service = next(s for s in known.node.services if s.srv_name.endswith(f'/{which}'))
    content = {'parameters': messages} if which.startswith('set') else {'names': [m.name for m in messages]}
    answer = service.callback(service.srv_type.Request(**content), service.srv_type.Response())
    assert isinstance(answer, service.srv_type.Response), answer
    results = {'set_parameters': lambda: answer.results, 'set_parameters_atomically': lambda: [answer.result]}
    for result in results.get(which, list)():
        assert result.successful or foreign or (result.reason.strip() and '\n' not in result.reason), result.reason
    if known.complaints and not foreign:
        raise known.complaints[0]
    known.check()


def robot_file(rng: random.Random, folder: Path) -> None:
    """A parameter file as ``library build`` and ``replay`` read it."""
    path = write(rng, folder)
    try:
        robot, settings = read_robot(path), Settings().with_values(**read_settings(path))
    except RMuscleError:
        return
    assert robot.topics and robot.joints.names and robot.control_rate_hz > 0, robot
    for row in rows():
        in_table(row, getattr(settings, row.name))


def node_file(rng: random.Random, folder: Path) -> None:
    """A parameter file given to the node, up to the comparison with a checkpoint."""
    from rmuscle_ros.contract import check_contract, check_topics, required
    from rmuscle_ros.params import named
    from rmuscle_ros.spin import BAD_ARGUMENTS
    path = write(rng, folder)
    try:
        started = Subject(['--ros-args', '--params-file', str(path)])
    except (RMuscleError, *BAD_ARGUMENTS):
        return
    try:
        started.check()
        options = started.parameters.node_settings
        required(options)
        check_contract(checkpoint_config(), options)
        check_topics({camera: started.parameters.topic(camera) for camera in named(options.cameras)})
    except RMuscleError:
        pass
    finally:
        started.node.destroy_node()


@functools.lru_cache(maxsize=1)
def checkpoint_config() -> Any:
    from rmuscle_ros.checkpoint import load_config
    return load_config(str(ROOT / 'config/policy/transfer_cube'))


@functools.lru_cache(maxsize=1)
def shipped() -> dict[str, Any]:
    """The parameters of the shipped files."""
    merged: dict[str, Any] = {}
    for name in ('default', 'workcell'):
        merged |= yaml.safe_load((ROOT / f'config/{name}.yaml').read_text())['/**']['ros__parameters']
    return merged


def write(rng: random.Random, folder: Path) -> Path:
    """A parameter file with some values replaced, and in half of the cases some of its text too."""
    content = dict(shipped())
    for _ in range(rng.randint(0, 3)):
        name = rng.choice((*content, 'image_topics', 'image_topics.top', 'no.such'))
        content[name] = rng.choice((plain, lambda r: r.choice(YAML_ONLY)))(rng)
    key = rng.choice(('/**', '/**', '/**', 'policy_node', '/fuzz/policy_node', 'other', 5, None))
    text = yaml.safe_dump({key: {rng.choice(('ros__parameters',) * 9 + ('parameters',)): content}}, allow_unicode=True)
    for _ in range(rng.choice((0, 0, 1, 2, 4))):
        at = rng.randrange(len(text) or 1)
        text = text[:at] + rng.choice((*JUNK, '', text[at:at + 40])) + text[at + rng.choice((0, 1, 20)):]
    path = folder / 'parameters.yaml'
    path.write_bytes(text.encode('utf-8' if rng.random() < 0.95 else 'utf-16', 'replace'))
    return path
