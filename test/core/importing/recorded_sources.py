# SPDX-License-Identifier: Apache-2.0
"""The same episodes as a LeRobotDataset v3 and as ROS 2 bags, written with the public libraries.

An episode is a list of Observations, one per control step, stamped from 0.
"""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import av
import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rosbags.rosbag2 import StoragePlugin, Writer
from rosbags.typesys import Stores, get_typestore

TYPES = get_typestore(Stores.ROS2_JAZZY)
START_NS = 1_700_000_000_000_000_000


def write_video(path, pictures, fps, codec='libx264rgb', pixels='rgb24', options=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), 'w') as container:
        stream = container.add_stream(codec, rate=Fraction(fps), options=options or {'qp': '0', 'g': '2'})
        stream.height, stream.width = pictures[0].shape[:2]
        stream.pix_fmt = pixels
        for picture in pictures:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format='rgb24')))
        container.mux(stream.encode())


def png(picture):
    return cv2.imencode('.png', cv2.cvtColor(picture, cv2.COLOR_RGB2BGR))[1].tobytes()


def write_dataset(root, episodes, fps, pictures='video', success=None, **video):
    """Two episodes to a data file, all of them in one video per camera. success: whether each episode succeeds."""
    root = Path(root)
    cameras = list(episodes[0][0].images)
    joints = len(episodes[0][0].state)
    tasks = sorted({episode[0].prompt for episode in episodes})
    features = {'observation.state': {'dtype': 'float32', 'shape': [joints], 'names': None},
                'action': {'dtype': 'float32', 'shape': [joints], 'names': None}}
    for camera in cameras:
        features[f'observation.images.{camera}'] = {
            'dtype': pictures, 'shape': list(episodes[0][0].images[camera].shape),
            'names': ['height', 'width', 'channels']}
    if success is not None:
        features['next.success'] = {'dtype': 'bool', 'shape': [1], 'names': None}
    (root / 'meta/episodes/chunk-000').mkdir(parents=True)
    (root / 'data/chunk-000').mkdir(parents=True)
    (root / 'meta/info.json').write_text(json.dumps({
        'codebase_version': 'v3.0', 'robot_type': 'cell', 'fps': fps, 'total_episodes': len(episodes), 'splits': {},
        'data_path': 'data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet',
        'video_path': 'videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4', 'features': features}))
    pq.write_table(pa.table({'task_index': list(range(len(tasks))), '__index_level_0__': tasks}),
                   root / 'meta/tasks.parquet')
    tables, rows, first = {}, [], 0
    for number, episode in enumerate(episodes):
        rows.append({'episode_index': number, 'tasks': [episode[0].prompt], 'length': len(episode),
                     'data/chunk_index': 0, 'data/file_index': number // 2, 'dataset_from_index': first,
                     'dataset_to_index': first + len(episode), 'stats/action/mean': [0.0] * joints})
        for camera in cameras if pictures == 'video' else ():
            place = {'chunk_index': 0, 'file_index': 0, 'from_timestamp': first / fps,
                     'to_timestamp': (first + len(episode)) / fps}
            rows[-1].update({f'videos/observation.images.{camera}/{name}': value for name, value in place.items()})
        columns = {
            'observation.state': pa.array([o.state.tolist() for o in episode], pa.list_(pa.float32(), joints)),
            'action': pa.array([o.state.tolist() for o in episode], pa.list_(pa.float32(), joints)),
            'timestamp': pa.array(np.arange(len(episode)) / fps, pa.float32()),
            'frame_index': list(range(len(episode))), 'episode_index': [number] * len(episode),
            'index': list(range(first, first + len(episode))),
            'task_index': [tasks.index(episode[0].prompt)] * len(episode)}
        if success is not None:
            columns['next.success'] = [False] * (len(episode) - 1) + [success[number]]
        if pictures == 'image':
            for camera in cameras:
                columns[f'observation.images.{camera}'] = [{'bytes': png(o.images[camera]), 'path': None}
                                                           for o in episode]
        tables.setdefault(number // 2, []).append(pa.table(columns))
        first += len(episode)
    for file, parts in tables.items():
        pq.write_table(pa.concat_tables(parts), root / f'data/chunk-000/file-{file:03d}.parquet')
    pq.write_table(pa.Table.from_pylist(rows), root / 'meta/episodes/chunk-000/file-000.parquet')
    for camera in cameras if pictures == 'video' else ():
        write_video(root / f'videos/observation.images.{camera}/chunk-000/file-000.mp4',
                    [o.images[camera] for episode in episodes for o in episode], fps, **video)
    return root


def header(stamp_ns):
    time = TYPES.types['builtin_interfaces/msg/Time'](sec=stamp_ns // 10**9, nanosec=stamp_ns % 10**9)
    return TYPES.types['std_msgs/msg/Header'](stamp=time, frame_id='')


def image(picture, stamp_ns):
    height, width = picture.shape[:2]
    return TYPES.types['sensor_msgs/msg/Image'](
        header=header(stamp_ns), height=height, width=width, encoding='rgb8', is_bigendian=0, step=3 * width,
        data=picture.ravel())


def compressed(picture, stamp_ns):
    return TYPES.types['sensor_msgs/msg/CompressedImage'](
        header=header(stamp_ns), format='bgr8; png compressed bgr8', data=np.frombuffer(png(picture), np.uint8))


def joint_state(names, positions, stamp_ns):
    nothing = np.empty(0)
    return TYPES.types['sensor_msgs/msg/JointState'](
        header=header(stamp_ns), name=list(names), position=np.asarray(positions, np.float64), velocity=nothing,
        effort=nothing)


def text(said):
    return TYPES.types['std_msgs/msg/String'](data=said)


def write_bag(path, messages, storage=StoragePlugin.MCAP):
    """messages: (topic, message, recording time in ns)."""
    with Writer(path, version=9, storage_plugin=storage) as writer:
        connections = {}
        for topic, message, time_ns in messages:
            if topic not in connections:
                connections[topic] = writer.add_connection(topic, message.__msgtype__, typestore=TYPES)
            writer.write(connections[topic], time_ns, TYPES.serialize_cdr(message, message.__msgtype__))
    return path


def messages_of(episode, joints, start_ns=START_NS, late_ns=30_000_000, namespace='', picture_message=image):
    """What a robot publishes: pictures recorded later than the joint states of the same stamp, and one prompt."""
    found = [(f'{namespace}/prompt', text(episode[0].prompt), start_ns)]
    for observation in episode:
        stamp_ns = start_ns + round(observation.stamp_s * 1e9)
        found.append((f'{namespace}/joint_states', joint_state(joints, observation.state, stamp_ns), stamp_ns))
        for number, (camera, picture) in enumerate(observation.images.items()):
            found.append((f'{namespace}/{camera}/image_raw', picture_message(picture, stamp_ns),
                          stamp_ns + late_ns * (number + 1)))
    return sorted(found, key=lambda message: message[2])
