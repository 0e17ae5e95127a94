# SPDX-License-Identifier: Apache-2.0
"""The predicted chunks as a ROS 2 bag, for PlotJuggler or Foxglove beside the recording."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rosbags.rosbag2 import StoragePlugin, Writer
from rosbags.typesys import Stores, get_typestore

from rmuscle_core.errors import EpisodeError
from rmuscle_core.replay.calls import ReplayedCall

TRAJECTORY, NUMBER = 'trajectory_msgs/msg/JointTrajectory', 'std_msgs/msg/Float64'


def write_chunks(path: Path, calls: Sequence[ReplayedCall], joints: Sequence[str], rate_hz: float,
                 per_call: np.ndarray) -> None:
    """Write an mcap bag: /rmuscle/dense and /rmuscle/cached (JointTrajectory, the checkpoint's units, stamped with
    their observation), /rmuscle/action_difference and /rmuscle/similarity (Float64, NaN without a reference).

    Raises EpisodeError when the folder exists.
    """
    if path.exists():
        raise EpisodeError(f'{path} exists; bags are not overwritten, choose another --out-bag')
    store = get_typestore(Stores.ROS2_JAZZY)
    path.parent.mkdir(parents=True, exist_ok=True)
    with Writer(path, version=9, storage_plugin=StoragePlugin.MCAP) as writer:
        topics = {name: writer.add_connection(f'/rmuscle/{name}', kind, typestore=store) for name, kind in (
            ('dense', TRAJECTORY), ('cached', TRAJECTORY), ('action_difference', NUMBER), ('similarity', NUMBER))}
        for call, difference in zip(calls, per_call):
            stamp_ns = round(call.stamp_s * 1e9)
            messages = {'dense': _trajectory(store, call.dense, joints, rate_hz, stamp_ns),
                        'cached': _trajectory(store, call.cached, joints, rate_hz, stamp_ns),
                        'action_difference': store.types[NUMBER](data=float(difference)),
                        'similarity': store.types[NUMBER](data=float(call.report.similarity))}
            for name, message in messages.items():
                writer.write(topics[name], stamp_ns, store.serialize_cdr(message, topics[name].msgtype))


def _trajectory(store, actions: np.ndarray, joints: Sequence[str], rate_hz: float, stamp_ns: int):
    types, empty = store.types, np.array([], np.float64)

    def span(name: str, nanoseconds: int):
        return types[f'builtin_interfaces/msg/{name}'](sec=nanoseconds // 10**9, nanosec=nanoseconds % 10**9)

    points = [types['trajectory_msgs/msg/JointTrajectoryPoint'](
        positions=row.astype(np.float64), velocities=empty, accelerations=empty, effort=empty,
        time_from_start=span('Duration', round((i + 1) * 1e9 / rate_hz))) for i, row in enumerate(actions)]
    header = types['std_msgs/msg/Header'](stamp=span('Time', stamp_ns), frame_id='')
    return types[TRAJECTORY](header=header, joint_names=list(joints), points=points)
