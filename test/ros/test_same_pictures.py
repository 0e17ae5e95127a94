# SPDX-License-Identifier: Apache-2.0
"""V05: what the policy sees live, what a bag gives and what a library is built from are equal to the last bit."""

from __future__ import annotations

import array
import hashlib

import cv2
import numpy as np
import pytest
from robot_bench import ARM7, stamp_message
from sensor_msgs.msg import CompressedImage, Image, JointState
from test_node_calls import T0, answered

from rmuscle_core.library.recording import RecordedEpisode, open_recording, write_recording
from rmuscle_core.processing.images import to_image
from rmuscle_core.sensing.joints import JointMap
from rmuscle_core.sensing.observe import ObservationBuffer

rosbag2 = pytest.importorskip('rosbags.rosbag2')
typesys = pytest.importorskip('rosbags.typesys')
TOPICS = {'base': 'base/image_raw', 'wrist': 'wrist/image_raw/compressed'}


def messages():
    """Wide pictures of noise around a white square, one with padded rows and one as JPEG, and joints in degrees."""
    pixels = np.random.default_rng(0).integers(0, 256, (180, 320, 3), dtype=np.uint8)
    pixels[65:115, 135:185] = 255
    raw = Image(height=180, width=320, encoding='bgr8', step=970)
    raw.data = array.array('B', np.pad(pixels.reshape(180, 960), ((0, 0), (0, 10))).tobytes())
    packed = CompressedImage(format='rgb8; jpeg compressed bgr8')
    packed.data = array.array('B', cv2.imencode('.jpg', pixels)[1].tobytes())
    joints = JointState(name=list(reversed(ARM7)), position=[0.1 * i for i in range(7)])
    return {'base/image_raw': raw, 'wrist/image_raw/compressed': packed, 'joint_states': joints}


def seen_live(make_bench):
    """What the policy is given by the node, and the same messages as a recorder gets them from the wire."""
    topics = {f'image_topics.{camera}': topic for camera, topic in TOPICS.items()}
    bench = make_bench(use_sim_time=True, joint_units=['deg'], **topics)
    publishers, recorded = {}, {}
    for topic, message in messages().items():
        publishers[topic] = bench.robot.create_publisher(type(message), topic, 10)
        bench.robot.create_subscription(type(message), topic,
                                        lambda raw, topic=topic: recorded.update({topic: raw}), 10, raw=True)
    assert bench.change('configure'), bench.node.last_error
    bench.until(lambda: all(p.get_subscription_count() == 2 for p in publishers.values()), 'discovery')
    assert bench.change('activate')
    bench.send_time(T0)
    for topic, message in messages().items():
        publishers[topic].publish(stamp_message(message, T0))
    answered(bench)
    bench.until(lambda: len(recorded) == 3, 'the recording')
    return bench.policy.seen[0], recorded


def seen_in_bag(recorded, path):
    types = typesys.get_typestore(typesys.Stores.ROS2_JAZZY)
    with rosbag2.Writer(path, version=9, storage_plugin=rosbag2.StoragePlugin.MCAP) as writer:
        for topic, message in messages().items():
            kind = f'sensor_msgs/msg/{type(message).__name__}'
            connection = writer.add_connection(f'/{topic}', kind, typestore=types)
            writer.write(connection, T0, recorded[topic])
    joints = JointMap.build(ARM7, units=['deg'])
    buffer = ObservationBuffer(joints, {c: f'/{t}' for c, t in TOPICS.items()}, 0.5, joint_topic='/joint_states')
    with rosbag2.Reader(path) as reader:
        for connection, time_ns, raw in reader.messages():
            assert buffer.add(connection.topic, types.deserialize_cdr(raw, connection.msgtype), time_ns)
    return buffer.take('lift', T0).observation


def seen_by_library_build(observation, path):
    write_recording(path, [RecordedEpisode('one', True, [observation])])
    with open_recording(path) as recording:
        return next(iter(recording)).observations[0]


def test_v05_live_bag_and_library_build_see_the_same(make_bench, tmp_path):
    live, recorded = seen_live(make_bench)
    ways = {'live': live, 'bag': seen_in_bag(recorded, tmp_path / 'bag'),
            'library': seen_by_library_build(live, tmp_path / 'recording.h5')}
    digests = {}
    for way, observation in ways.items():
        tensors = {camera: to_image(observation.images[camera], 224) for camera in TOPICS}
        digests[way] = [hashlib.sha256(tensors[camera].numpy().tobytes()).hexdigest() for camera in TOPICS]
        np.testing.assert_array_equal(observation.state, live.state, err_msg=way)
        assert (observation.prompt, observation.stamp_s) == (live.prompt, live.stamp_s)
        lit = tensors['base'].amin(0) > 0.95
        assert abs(lit.any(1).sum() / lit.any(0).sum() - 1) <= 0.03  # the square is still one
        assert (tensors['base'][:, :49] == -1).all() and (tensors['base'][:, -49:] == -1).all()
    assert digests['bag'] == digests['live'] and digests['library'] == digests['live']
    np.testing.assert_allclose(live.state, np.rad2deg(np.arange(6, -1, -1) * 0.1), rtol=1e-6)
