# SPDX-License-Identifier: Apache-2.0
"""Executions of a policy in the simulated cell as a ROS 2 bag: what a robot there would have recorded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import cv2
import numpy as np
from rosbags.rosbag2 import StoragePlugin, Writer
from rosbags.typesys import Stores, get_typestore

from rmuscle_core.errors import EpisodeError
from rmuscle_core.observation import Observation
from rmuscle_core.policy import MusclePolicy
from rmuscle_core.workcell.tasks import Cell

EPISODES_TOPIC = '/rmuscle/episode'  # std_msgs/String, the prompt: each message begins an episode
PAUSE_S = 2.0  # between episodes


def frames(cell: Cell, policy: MusclePolicy, seed: int) -> Iterator[tuple[dict[str, np.ndarray], np.ndarray]]:
    """Pictures and joint state at every control period of one execution."""
    cell.reset(seed)
    policy.reset_episode(cell.task)
    executed, step = policy.config.execute_steps, 0
    while step < cell.episode_steps:
        now = cell.images(), cell.state()
        yield now
        chunk = policy.infer(Observation(*now, cell.task, step / cell.control_rate))
        for number, command in enumerate(chunk.actions[:executed]):
            if number:
                yield cell.images(), cell.state()
            step += 1
            if cell.step(command) or step == cell.episode_steps:
                return


def write_bag(path: Path, cell: Cell, policy: MusclePolicy, seeds: Sequence[int]) -> None:
    """Write an mcap bag with one episode per seed: <camera>/image_raw/compressed (PNG), joint_states, EPISODES_TOPIC.

    Raises EpisodeError when the folder exists.
    """
    if path.exists():
        raise EpisodeError(f'{path} exists; bags are not overwritten, choose another --out')
    path.parent.mkdir(parents=True, exist_ok=True)
    store = get_typestore(Stores.ROS2_JAZZY)
    image, joints, text = 'sensor_msgs/msg/CompressedImage', 'sensor_msgs/msg/JointState', 'std_msgs/msg/String'
    period_ns, now_ns = round(1e9 / cell.control_rate), round(1e9)
    with Writer(path, version=9, storage_plugin=StoragePlugin.MCAP) as writer:
        topics = {camera: writer.add_connection(f'/{camera}/image_raw/compressed', image, typestore=store)
                  for camera in cell.cameras}
        topics |= {'joints': writer.add_connection('/joint_states', joints, typestore=store),
                   'episode': writer.add_connection(EPISODES_TOPIC, text, typestore=store)}

        def write(name: str, message) -> None:
            writer.write(topics[name], now_ns, store.serialize_cdr(message, topics[name].msgtype))

        for seed in seeds:
            write('episode', store.types[text](data=cell.task))
            for pictures, state in frames(cell, policy, seed):
                header = _header(store, now_ns)
                for camera, picture in pictures.items():
                    encoded = cv2.imencode('.png', picture[..., ::-1], [cv2.IMWRITE_PNG_COMPRESSION, 9])[1]
                    write(camera, store.types[image](header=header, format='rgb8; png compressed bgr8',
                                                     data=encoded.ravel()))
                write('joints', store.types[joints](header=header, name=list(cell.joints),
                                                    position=state.astype(np.float64), velocity=np.array([]),
                                                    effort=np.array([])))
                now_ns += period_ns
            now_ns += round(PAUSE_S * 1e9)


def _header(store, now_ns: int):
    stamp = store.types['builtin_interfaces/msg/Time'](sec=now_ns // 10**9, nanosec=now_ns % 10**9)
    return store.types['std_msgs/msg/Header'](stamp=stamp, frame_id='')
