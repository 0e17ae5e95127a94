# SPDX-License-Identifier: Apache-2.0
"""ROS parameters of the policy node: the settings of a policy call, and the node's own, each declared once in a table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import Field, dataclass, fields, replace
from typing import Any

from rcl_interfaces.msg import FloatingPointRange, IntegerRange, ParameterDescriptor, ParameterType, SetParametersResult
from rclpy.exceptions import InvalidParameterTypeException, InvalidParameterValueException
from rclpy.node import Node
from rclpy.parameter import Parameter

from rmuscle_core.errors import SettingsError
from rmuscle_core.settings import ON_CONFIGURE, Settings, check, rows, setting

INFINITY = float('inf')
TOPICS = 'image_topics.'


@dataclass(frozen=True)
class NodeSettings:
    """The node's own parameters, an immutable snapshot. Lists of one value hold for every joint."""

    checkpoint: str = setting('', 'checkpoint directory (LeRobot layout); required', effect=ON_CONFIGURE)
    library: str = setting('', 'episode library directory; empty runs without one', effect=ON_CONFIGURE)
    device: str = setting('auto', 'torch device, or "auto": cuda where there is one', effect=ON_CONFIGURE)
    prompt: str = setting('', 'task instruction; the topic "prompt" overrides it, an empty message there restores it')
    joint_names: tuple[str, ...] = setting(('',), "joints in the order of the checkpoint's state; required",
                                             effect=ON_CONFIGURE)
    joint_units: tuple[str, ...] = setting(('',), 'unit of the policy: same as the robot\'s, or deg for a robot in '
                                            'radians; a joint left empty is taken as same, but refused when its '
                                            'first values look otherwise', effect=ON_CONFIGURE)
    joint_scale: tuple[float, ...] = setting((1.0,), 'robot = scale * policy + offset, after joint_units',
                                             effect=ON_CONFIGURE)
    joint_offset: tuple[float, ...] = setting((0.0,), 'see joint_scale', unit='robot units', effect=ON_CONFIGURE)
    joint_lower: tuple[float, ...] = setting((-INFINITY,), 'lower position limit; actions beyond are held at it',
                                             unit='robot units', effect=ON_CONFIGURE)
    joint_upper: tuple[float, ...] = setting((INFINITY,), 'upper position limit', unit='robot units',
                                             effect=ON_CONFIGURE)
    policy_at_lower: tuple[float, ...] = setting((-INFINITY,), 'what the policy calls joint_lower, as 1 for a gripper '
                                                 'that is closed there; infinite: joint_units tells',
                                                 effect=ON_CONFIGURE)
    policy_at_upper: tuple[float, ...] = setting((INFINITY,), 'what the policy calls joint_upper', effect=ON_CONFIGURE)
    max_step: tuple[float, ...] = setting((INFINITY,), 'largest change from one commanded step to the next; faster '
                                          'actions are held back', unit='robot units', effect=ON_CONFIGURE)
    max_jump: tuple[float, ...] = setting((INFINITY,), 'a chunk that starts further from the running command is '
                                          'refused', unit='robot units', effect=ON_CONFIGURE)
    cameras: tuple[str, ...] = setting(('',), 'checkpoint cameras fed from a topic, named by image_topics.<camera>; '
                                       'required', effect=ON_CONFIGURE)
    masked_cameras: tuple[str, ...] = setting(('',), 'checkpoint cameras this robot does not have', effect=ON_CONFIGURE)
    camera_rate_hz: float = setting(0.0, 'expected frame rate, below which diagnostics warn; 0 expects none', low=0.0,
                                    high=1000.0, unit='Hz', effect='next diagnostics')
    max_age_s: float = setting(0.5, 'no policy call on a sample older than this', low=0.01, high=60.0, unit='s')
    max_skew_s: float = setting(0.0, 'no policy call on cameras and joints whose stamps are further apart than this; 0 '
                                'allows any', low=0.0, high=60.0, unit='s')
    control_rate_hz: float = setting(25.0, 'actions per second the policy was trained at', low=0.1, high=1000.0,
                                     unit='Hz', effect=ON_CONFIGURE)
    horizon: int = setting(0, 'steps of a chunk, to be checked against the checkpoint; 0 takes its', low=0, high=1000,
                           unit='steps', effect=ON_CONFIGURE)
    action_mode: str = setting('checkpoint', 'what actions mean, to be checked against the checkpoint',
                               choices=('checkpoint', 'absolute', 'relative'), effect=ON_CONFIGURE)
    execute_steps: int = setting(0, "actions of a chunk executed before the next call; 0 takes the checkpoint's",
                                 low=0, high=1000, unit='steps', effect=ON_CONFIGURE)
    call_lead_s: float = setting(0.0, 'how long before the executed actions end the next observation may be taken',
                                 low=0.0, high=10.0, unit='s', effect=ON_CONFIGURE)
    blend_s: float = setting(0.2, "time in which a chunk's offset to the running command is faded out", low=0.0,
                             high=5.0, unit='s', effect=ON_CONFIGURE)
    stamp_mode: str = setting('observation', 'start of a chunk: its observation (steps already past are left out) '
                              'or now', choices=('observation', 'now'), effect=ON_CONFIGURE)
    send_velocities: bool = setting(True, 'trajectory points carry velocities, so that controllers use a spline',
                                    effect=ON_CONFIGURE)
    autostart_episode: bool = setting(True, 'activation starts an episode; otherwise the service ~/start does',
                                      effect='activate')
    stall_timeout_s: float = setting(5.0, 'a policy call longer than this is reported and its answer dropped', low=0.05,
                                     high=600.0, unit='s')


def coerce(row: Field, value: Any) -> Any:
    """Return the value in the row's type; an integer is taken for a float.

    Raises SettingsError naming the parameter, its type and its range.
    """
    if row.name in {r.name for r in rows()}:
        return check(row.name, value)
    default, meta = row.default, row.metadata
    if isinstance(default, tuple):
        kind = type(default[0])
        allowed = (int, float) if kind is float else kind
        if not isinstance(value, Iterable) or isinstance(value, (str, bytes)):
            raise SettingsError(f'{row.name} must be a list of {kind.__name__}, not {value!r}')
        items = list(value) or ['' if kind is str else math.nan]
        if any(isinstance(v, bool) or not isinstance(v, allowed) or v != v for v in items):
            raise SettingsError(f'{row.name} must be a non-empty list of {kind.__name__}, not {value!r}')
        return tuple(kind(v) for v in items)
    if isinstance(default, (str, bool)):
        if not isinstance(value, type(default)) or (meta['choices'] and value not in meta['choices']):
            raise SettingsError(f'{row.name} must be {_kind(row)}, not {value!r}')
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not meta['low'] <= value <= meta['high'] or \
            (isinstance(default, int) and value != int(value)):
        raise SettingsError(f'{row.name} must be {_kind(row)}, not {value!r}')
    return type(default)(value)


def _kind(row: Field) -> str:
    meta, kind = row.metadata, type(row.default)
    if meta['choices']:
        return 'one of ' + ', '.join(meta['choices'])
    if kind is str or kind is bool:
        return f'a {"string" if kind is str else "boolean"}'
    return f'{"an integer" if kind is int else "a number"} in [{meta["low"]}, {meta["high"]}]'


def descriptor(row: Field) -> ParameterDescriptor:
    """Description with unit, range or choices, and when a change takes effect."""
    meta = row.metadata
    text = meta['description'] + (f' [{meta["unit"]}]' if meta['unit'] else '')
    rule = f'takes effect: {meta["effect"]}' + (f'; one of: {", ".join(meta["choices"])}' if meta['choices'] else '')
    described = ParameterDescriptor(description=text, additional_constraints=rule)
    if isinstance(row.default, float):
        limits = {'from_value': float(meta['low']), 'to_value': float(meta['high'])}
        described.floating_point_range = [FloatingPointRange(**limits, step=0.0)]
    elif isinstance(row.default, int) and not isinstance(row.default, bool):
        described.integer_range = [IntegerRange(from_value=int(meta['low']), to_value=int(meta['high']), step=1)]
    return described


class NodeParameters:
    """Declares the parameters on a node and keeps ``settings`` and ``node_settings`` in step with them.

    locked() says that the node is configured: what takes effect at configure is refused then. changed() is called on
    the executor thread after a change. Raises SettingsError for a bad value in a parameter file or on the command
    line.
    """

    def __init__(self, node: Node, locked: Callable[[], bool], changed: Callable[[], None]):
        self._node, self._locked, self._changed = node, locked, changed
        self._rows = {row.name: row for row in (*rows(), *fields(NodeSettings))}
        values = {name: self._given(name) for name in self._rows}
        given = {name: coerce(self._rows[name], value) for name, value in values.items() if value is not None}
        core = {row.name for row in rows()}
        self.settings = Settings().with_values(**{n: v for n, v in given.items() if n in core})
        self.node_settings = NodeSettings(**{n: v for n, v in given.items() if n not in core})
        self._topics: set[str] = set()
        for name, row in self._rows.items():
            value = getattr(self.settings if name in core else self.node_settings, name)
            value = list(value) if isinstance(value, tuple) else value
            node.declare_parameter(name, value, descriptor(row), ignore_override=True)
        self.declare_topics()
        node.set_descriptor('use_sim_time', ParameterDescriptor(
            type=ParameterType.PARAMETER_BOOL, description='take the time from /clock',
            additional_constraints='takes effect: at once'))
        node.add_pre_set_parameters_callback(self._complete)
        node.add_on_set_parameters_callback(self._validate)
        node.add_post_set_parameters_callback(self._apply)

    def declare_topics(self) -> None:
        """Declare image_topics.<camera> for each of ``cameras``; called again when these may have changed."""
        for camera in named(self.node_settings.cameras):
            if camera not in self._topics:
                text = f'image topic of camera {camera}; a name ending in /compressed is subscribed as CompressedImage'
                rule = ParameterDescriptor(description=text, additional_constraints=f'takes effect: {ON_CONFIGURE}')
                try:
                    self._node.declare_parameter(TOPICS + camera, f'{camera}/image_raw', rule)
                except (InvalidParameterTypeException, InvalidParameterValueException) as error:
                    raise SettingsError(f'{TOPICS}{camera} must be a topic name: {error}') from error
                self._topics.add(camera)

    def topic(self, camera: str) -> str:
        """The camera's image topic."""
        return self._node.get_parameter(TOPICS + camera).value

    def changed_from_default(self) -> dict[str, Any]:
        """Parameters that differ from the tables, for the log."""
        now = {**vars(self.settings), **vars(self.node_settings)}
        return {name: now[name] for name, row in self._rows.items() if now[name] != row.default}

    def unknown(self) -> list[str]:
        """Names given at start that no parameter bears: misspelled, or meant for another node of a shared file."""
        given = getattr(self._node, '_parameter_overrides', {})  # rclpy has no public way to them
        return [n for n in given if not self._node.has_parameter(n)]

    def _given(self, name: str) -> Any:
        # Declared without a type first: a double given as an integer would otherwise end the process with a traceback.
        value = self._node.declare_parameter(name, None, ParameterDescriptor(dynamic_typing=True)).value
        self._node.undeclare_parameter(name)
        return value

    def _complete(self, parameters: list[Parameter]) -> list[Parameter]:
        """Before validation: integers become doubles, a profile brings its ratios, a ratio its profile's name."""
        values = {}
        for p in parameters:
            default = self._rows[p.name].default if p.name in self._rows else None
            if isinstance(default, float) and p.type_ is Parameter.Type.INTEGER:
                p = Parameter(p.name, value=float(p.value))
            elif isinstance(default, tuple) and p.type_ is Parameter.Type.INTEGER_ARRAY:
                p = Parameter(p.name, value=[float(v) for v in p.value])
            values[p.name] = p
        linked = {name: values[name].value for name in ('profile', 'token_ratio', 'neuron_ratio') if name in values}
        try:
            derived = self.settings.with_values(**linked)
        except SettingsError:
            return list(values.values())  # refused, with its reason, by the validation
        for name in ('profile', 'token_ratio', 'neuron_ratio') if linked else ():
            values[name] = Parameter(name, value=getattr(derived, name))
        return list(values.values())

    def _validate(self, parameters: list[Parameter]) -> SetParametersResult:
        try:
            for parameter in parameters:
                row = self._rows.get(parameter.name)
                structural = row.metadata['effect'] == ON_CONFIGURE if row else parameter.name.startswith(TOPICS)
                if structural and self._locked():
                    raise SettingsError(f'{parameter.name} takes effect at configure; deactivate and clean up the node '
                                        'first')
                if row:
                    coerce(row, parameter.value)
        except SettingsError as error:
            return SetParametersResult(successful=False, reason=str(error))
        return SetParametersResult(successful=True)

    def _apply(self, parameters: list[Parameter]) -> None:
        values = {p.name: coerce(self._rows[p.name], p.value) for p in parameters if p.name in self._rows}
        core = {row.name for row in rows()}
        # Not with_values(): _complete has already linked profile and ratios.
        self.settings = replace(self.settings, **{n: v for n, v in values.items() if n in core})
        self.node_settings = replace(self.node_settings, **{n: v for n, v in values.items() if n not in core})
        if values:
            self._changed()


def named(names: Iterable[str]) -> tuple[str, ...]:
    """A list parameter without its empty entries; ROS cannot express an empty list of strings."""
    return tuple(name for name in names if name)
