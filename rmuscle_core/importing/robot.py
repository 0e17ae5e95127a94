# SPDX-License-Identifier: Apache-2.0
"""The policy node's parameter file, as far as it says where a robot's observations come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rmuscle_core.errors import SettingsError, reason
from rmuscle_core.model.options import TYPE_NAMES
from rmuscle_core.sensing.joints import JointMap
from rmuscle_core.settings import check, rows

# parameter of the node -> argument of JointMap.build
_JOINTS = {'joint_scale': 'scale', 'joint_offset': 'offset', 'joint_lower': 'lower', 'joint_upper': 'upper',
           'joint_units': 'units', 'policy_at_lower': 'at_lower', 'policy_at_upper': 'at_upper'}


@dataclass(frozen=True)
class Robot:
    """What the node subscribes to. topics: camera -> image topic, masked cameras left out. Defaults are the node's."""

    joints: JointMap
    topics: Mapping[str, str]
    masked: tuple[str, ...] = ()
    prompt: str = ''
    max_age_s: float = 0.5
    max_skew_s: float = 0.0
    control_rate_hz: float = 25.0
    execute_steps: int = 0  # the checkpoint's


def read_robot(path: Path, node: str = 'policy_node') -> Robot:
    """Read the parameters given for every node and for ``node``. Raises SettingsError naming file and parameter."""
    values = _parameters(path, node)
    masked = tuple(name for name in _list(values, 'masked_cameras', str, path) if name)
    cameras = [name for name in _list(values, 'cameras', str, path) if name and name not in masked]
    if not cameras:
        raise SettingsError(f'{path} sets no cameras for {node}; give the file that the policy node is started with')
    topics = {camera: _one(values, f'image_topics.{camera}', f'{camera}/image_raw', str, path) for camera in cameras}
    given = {argument: _list(values, name, str if name == 'joint_units' else float, path)
             for name, argument in _JOINTS.items() if name in values}
    joints = _named(path, JointMap.build, _list(values, 'joint_names', str, path), **given)
    numbers = {name: _one(values, name, getattr(Robot, name), float, path)
               for name in ('max_age_s', 'max_skew_s', 'control_rate_hz')}
    if not (numbers['control_rate_hz'] > 0 and numbers['max_age_s'] > 0 and numbers['max_skew_s'] >= 0):
        raise SettingsError(f'{path}: control_rate_hz and max_age_s must be above 0 and max_skew_s at least 0; correct '
                            'the file')
    return Robot(joints, topics, masked, _one(values, 'prompt', '', str, path),
                 execute_steps=_one(values, 'execute_steps', 0, int, path), **numbers)


def read_settings(path: Path, node: str = 'policy_node') -> dict[str, Any]:
    """The rows of the settings table that the file sets, checked, for ``Settings.with_values``."""
    values = _parameters(path, node)
    return {row.name: _named(path, check, row.name, values[row.name]) for row in rows() if row.name in values}


def _named(path: Path, make: Callable[..., Any], *arguments: Any, **further: Any) -> Any:
    """What ``make`` returns; its SettingsError says in which file the value is."""
    try:
        return make(*arguments, **further)
    except SettingsError as error:
        raise SettingsError(f'{path}: {error}') from error


def _parameters(path: Path, node: str) -> dict[str, Any]:
    """Flat parameters, names joined by "."; what is given for the node goes before what is given for all."""
    try:
        content = yaml.safe_load(path.read_text())
        if not isinstance(content, dict):
            raise TypeError
        keys = [key for key in ('/**', node, f'/{node}', f'/**/{node}') if key in content]
        sections = [content[key]['ros__parameters'] for key in keys]
        if not all(isinstance(section, Mapping) for section in sections):
            raise TypeError
    except (OSError, UnicodeDecodeError, yaml.YAMLError, TypeError, KeyError) as error:
        raise SettingsError(f'{path} is no ROS parameter file ({reason(error)}); expected '
                            f'"/**:" or "{node}:" with "ros__parameters:" below') from error
    if not sections:
        raise SettingsError(f'{path} has parameters for {", ".join(map(str, content))} only; expected "/**:" or '
                            f'"{node}:"')
    return {name: value for section in sections for name, value in _flat(section)}


def _flat(section: Mapping[str, Any], prefix: str = '') -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for name, value in section.items():
        flat += _flat(value, f'{prefix}{name}.') if isinstance(value, Mapping) else [(f'{prefix}{name}', value)]
    return flat


def _one(values: Mapping[str, Any], name: str, default: Any, kind: type, path: Path) -> Any:
    value = values.get(name, default)
    allowed = (int, float) if kind is float else kind
    if isinstance(value, bool) or not isinstance(value, allowed):
        raise SettingsError(f'{path}: {name} must be {TYPE_NAMES[kind]}, not {value!r}; correct the file')
    return kind(value)


def _list(values: Mapping[str, Any], name: str, kind: type, path: Path) -> list[Any]:
    value = values.get(name, [])
    if not isinstance(value, list):
        raise SettingsError(f'{path}: {name} must be a list, not {value!r}; correct the file')
    return [_one({name: item}, name, None, kind, path) for item in value]
