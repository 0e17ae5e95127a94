# SPDX-License-Identifier: Apache-2.0
"""Does this robot fit this checkpoint? Asked before any weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rclpy.exceptions import InvalidTopicNameException
from rclpy.validate_topic_name import validate_topic_name

from rmuscle_core.errors import CheckpointError, SettingsError
from rmuscle_core.sensing.joints import JointMap
from rmuscle_ros.params import NodeSettings, named

UNREADABLE = ('compressedDepth', 'theora', 'ffmpeg', 'zstd')  # image_transport's endings


@dataclass(frozen=True)
class Contract:
    """cameras: those fed from a topic, in checkpoint order. ignored: configured ones the checkpoint does not know.

    horizon: steps of a chunk.
    """

    joints: JointMap
    cameras: tuple[str, ...]
    ignored: tuple[str, ...]
    execute_steps: int
    horizon: int


def check_contract(config: Any, options: NodeSettings) -> Contract:
    """Compare the node's parameters with the checkpoint's ``config`` (a ModelConfig).

    Raises SettingsError naming the parameter, or CheckpointError for a checkpoint that cannot drive joints.
    """
    joints = JointMap.build(named(options.joint_names), options.joint_scale, options.joint_offset, options.joint_lower,
                            options.joint_upper, options.max_jump, step=options.max_step, units=options.joint_units,
                            at_lower=options.policy_at_lower, at_upper=options.policy_at_upper)
    if config.state_dim != config.action_dim:
        raise CheckpointError(f'{options.checkpoint}: the state has {config.state_dim} dimensions and the action '
                              f'{config.action_dim}; a joint trajectory needs an action for every joint of the state')
    if len(joints.names) != config.action_dim:
        raise SettingsError(f'joint_names has {len(joints.names)} joints ({", ".join(joints.names)}), the checkpoint '
                            f'{options.checkpoint} has {config.action_dim}; list its joints in its order')
    fed, masked = named(options.cameras), named(options.masked_cameras)
    missing = [camera for camera in config.cameras if camera not in fed and camera not in masked]
    if missing:
        raise SettingsError(f'no topic for the checkpoint\'s camera {", ".join(missing)}; add it to cameras with its '
                            f'image_topics.<camera>, or to masked_cameras if the robot has none (its cameras: '
                            f'{", ".join(config.cameras)})')
    if options.horizon not in (0, config.chunk_size):
        raise SettingsError(f'horizon is {options.horizon}, but this checkpoint was trained on chunks of '
                            f'{config.chunk_size} steps; set 0 to take its own, or execute_steps to execute fewer')
    if options.execute_steps > config.chunk_size:
        raise SettingsError(f'execute_steps is {options.execute_steps}, but a chunk of this checkpoint has '
                            f'{config.chunk_size} steps; choose at most that, or 0 for its own {config.execute_steps}')
    return Contract(joints, tuple(c for c in config.cameras if c in fed and c not in masked),
                    tuple(c for c in fed if c not in config.cameras), options.execute_steps or config.execute_steps,
                    config.chunk_size)


def check_topics(topics: Mapping[str, str]) -> None:
    """Raise SettingsError for a camera's topic that is no name, or carries no picture we can read."""
    for camera, topic in topics.items():
        try:
            validate_topic_name(topic)
        except InvalidTopicNameException as error:
            raise SettingsError(f'image_topics.{camera} is {topic!r}, which is no topic name: {error}; a camera whose '
                                f'own name is none needs an image_topics.{camera}') from error
        base, _, transport = topic.rpartition('/')
        if transport in UNREADABLE:
            raise SettingsError(f'image_topics.{camera} is {topic}, whose {transport} transport cannot be read; use '
                                f'{base} or {base}/compressed of a colour image')


def check_action_mode(policy: Any, options: NodeSettings) -> None:
    """Raise SettingsError when the user expects other actions than the policy gives."""
    mode = 'relative' if policy.relative_actions else 'absolute'
    if options.action_mode not in ('checkpoint', mode):
        raise SettingsError(f'action_mode is {options.action_mode}, but the actions of {options.checkpoint} are {mode} '
                            'by its processor files; set action_mode to checkpoint, or use the checkpoint you meant')


def required(options: NodeSettings) -> None:
    """Raise SettingsError listing every required parameter that is not set."""
    unset = [name for name in ('checkpoint', 'joint_names', 'cameras') if not any(getattr(options, name))]
    if unset:
        raise SettingsError(f'{", ".join(unset)} not set; a parameter file keyed for another node name is ignored '
                            'silently, a file that starts with "/**:" fits every name')
