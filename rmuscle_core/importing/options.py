# SPDX-License-Identifier: Apache-2.0
"""Command-line options of every command that reads recorded episodes."""

from __future__ import annotations

import argparse
from pathlib import Path

from rmuscle_core.errors import SettingsError
from rmuscle_core.importing.episodes import EpisodeSource, Wanted
from rmuscle_core.importing.sources import SourceOptions, open_source
from rmuscle_core.model.config import ModelConfig
from rmuscle_core.options import pairs, positive, whole

EPISODES = 'recording (.h5), folder of a LeRobotDataset v3, ROS 2 bag (mcap or sqlite3), or folder of bags'


def add_source_options(parser: argparse.ArgumentParser) -> None:
    """How names and times of a dataset or a bag are to be understood."""
    group = parser.add_argument_group('datasets and bags')
    group.add_argument('--camera', action='append', default=[], metavar='CAMERA=NAME',
                       help='camera of the checkpoint and its name in the dataset, where they differ; may be repeated')
    group.add_argument('--masked-camera', action='append', default=[], metavar='CAMERA',
                       help='camera of the checkpoint that the robot does not have; may be repeated')
    group.add_argument('--prompt', default='', help='instruction of every episode (default: the recorded one)')
    group.add_argument('--execute-steps', type=whole(1), default=0, metavar='N', help="actions between two policy "
                       "calls (default: the parameter file's, else the checkpoint's)")
    group.add_argument('--control-rate-hz', type=positive, metavar='HZ', help='actions per second (default: the frames '
                       'per second of a dataset, control_rate_hz of the parameter file)')
    group.add_argument('--tolerance-s', type=positive, default=1e-4, metavar='S', help="how far a dataset's stamps may "
                       'be from its frame rate, seconds (default: 1e-4, as LeRobot)')
    group.add_argument('--parameters', type=Path, metavar='YAML', help='parameter file of the policy node, which names '
                       'topics and joints; a bag needs it')
    group.add_argument('--topic', action='append', default=[], metavar='NAME=TOPIC',
                       help='topic in a bag of joint_states, prompt or an image topic of the parameter file, where '
                       'it has another name there; may be repeated')
    group.add_argument('--episodes-topic', default='', metavar='TOPIC', help='each message on it begins an episode; '
                       'without it a bag is one')


def source_of(path: Path, args: argparse.Namespace, config: ModelConfig) -> EpisodeSource:
    """Open the episodes at a path as the options say. Raises as ``open_source``, and SettingsError for an option."""
    wanted = Wanted(config.cameras, config.state_dim, config.execute_steps, pairs('--camera', args.camera),
                    args.masked_camera, args.control_rate_hz, args.prompt)
    options = SourceOptions(args.execute_steps, args.tolerance_s, args.parameters, pairs('--topic', args.topic),
                            args.episodes_topic)
    source = open_source(path, wanted, options)
    if not 1 <= source.execute_steps <= config.chunk_size:
        source.__exit__(None, None, None)
        raise SettingsError(f'execute_steps is {source.execute_steps}, expected 1 to {config.chunk_size}, the steps '
                            'of a chunk; correct --execute-steps or the parameter file')
    return source
