# SPDX-License-Identifier: Apache-2.0
"""What reaches the policy, over a real ROS graph: V01, V04 and V06 to V10, with their siblings."""

from __future__ import annotations

import array
import queue
import threading

import numpy as np
import pytest
from rclpy import event_handler
from rclpy.context import Context
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from robot_bench import ARM7, EchoPolicy, sentinel, stamp_message
from sensor_msgs.msg import CompressedImage, Image
from std_msgs.msg import String
from test_node_calls import DT, T0, S, answered, diagnosis

from rmuscle_core.sensing import observe

FRAME = S // 30


@pytest.fixture
def sim(make_bench):
    """Factory of an active bench in simulated time, at T0."""
    def make(policy=None, **parameters):
        bench = make_bench(policy, use_sim_time=True, **parameters)
        bench.activate()
        bench.send_time(T0)
        return bench
    return make


def arrived(bench, camera, stamp_ns):
    latest = bench.node._buffer.streams[camera].latest
    return latest is not None and latest.stamp_ns == stamp_ns


def settle(bench):
    """Wait until the inference thread has looked at everything that arrived."""
    worker = bench.node._worker
    bench.until(lambda: not worker._busy and not worker._news, 'an idle inference thread')


def values(status):
    return {v.key: v.value for v in status.values}


def test_v01_joints_are_mapped_by_name_in_any_order(sim):
    bench = sim()
    sent = dict(zip(ARM7, (.1, .2, .3, .4, .5, .6, .9)), foreign=7.0)
    orders = (('j3', 'j1', 'gripper', 'j2', 'j6', 'j5', 'j4'),
              ('gripper', 'foreign', 'j6', 'j5', 'j4', 'j3', 'j2', 'j1'))
    for number, order in enumerate(orders):
        now = T0 + number * S
        bench.send_time(now)
        bench.send_image('base', now)
        bench.send_image('wrist', now)
        bench.send_joints(now, [sent[name] for name in order], order)
        answered(bench, number + 1)
        np.testing.assert_allclose(bench.policy.seen[-1].state, [.1, .2, .3, .4, .5, .6, .9], atol=1e-6)
        assert bench.trajectories[-1].joint_names == list(ARM7)


def test_v01_arm_and_gripper_from_two_publishers(sim):
    bench = sim(max_age_s=0.3)
    bench.send_image('base', T0)
    bench.send_image('wrist', T0)
    bench.send_joints(T0, [.9], ['gripper'])
    diagnosis(bench, 'joint states', lambda s: s.level == b'\x03' and s.message.endswith('j1, j2, j3, j4, j5, j6'))
    bench.send_joints(T0, [.6, .5, .4, .3, .2, .1], ['j6', 'j5', 'j4', 'j3', 'j2', 'j1'])
    answered(bench)
    np.testing.assert_allclose(bench.policy.seen[-1].state, [.1, .2, .3, .4, .5, .6, .9], atol=1e-6)
    later = T0 + S  # the gripper's publisher has died
    bench.send_time(later)
    bench.send_image('base', later)
    bench.send_image('wrist', later)
    bench.send_joints(later, [.6, .5, .4, .3, .2, .1], ['j6', 'j5', 'j4', 'j3', 'j2', 'j1'])
    found = diagnosis(bench, 'joint states', lambda s: s.level == b'\x02')
    assert 'joint gripper on joint_states is 1.00 s old' in found.message and len(bench.policy.seen) == 1


def test_v02_v03_unreadable_frame_is_counted_and_the_topic_named(sim, capfd):
    bench = sim()
    bench.send_image('base', T0)
    bench.send_joints(T0, (0,) * 7)
    broken = stamp_message(sentinel(2), T0)
    broken.data = broken.data[:-1]
    bench.images['wrist'].publish(broken)
    bench.until(lambda: bench.node._buffer.streams['wrist'].frames_bad, 'the refusal')
    for number in range(1, 4):
        broken.header.stamp.nanosec = number
        bench.images['wrist'].publish(broken)
        bench.until(lambda number=number: bench.node._buffer.streams['wrist'].frames_bad == number + 1, 'the refusal')
    said = capfd.readouterr().err
    assert said.count('wrist/image_raw: 191 bytes do not make a 8x8 rgb8 image') == 1 and 'Traceback' not in said
    found = diagnosis(bench, 'camera wrist', lambda s: values(s)['frames_bad'] == '4')
    assert found.level != b'\x00' and bench.state() == 'active' and bench.policy.seen == []
    bench.send_image('wrist', T0)
    answered(bench)


@pytest.mark.parametrize(('parameters', 'words'), [
    ({'cameras': ['base']}, ['camera wrist', 'masked_cameras']),
    ({'cameras': ['wrist', 'front']}, ['camera base', 'base, wrist']),
    ({'image_topics.wrist': '/c1/image_raw/compressedDepth'}, ['image_topics.wrist', 'compressedDepth', 'image_raw']),
    ({'image_topics.base': '/c1/image_raw/ffmpeg'}, ['image_topics.base', 'ffmpeg']),
    ({'image_topics.base': ''}, ['image_topics.base', 'must not be empty']),
    ({'image_topics.wrist': 'wrist camera/image_raw'}, ['image_topics.wrist', 'no topic name'])])
def test_v04_cameras_are_checked_before_the_weights_are_read(make_bench, parameters, words):
    bench = make_bench(**parameters)
    assert not bench.change('configure') and bench.state() == 'unconfigured' and bench.loaded == []
    assert all(word in bench.node.last_error for word in words), bench.node.last_error


def test_v04_cameras_reach_their_slots_by_name(sim):
    swapped = {'image_topics.wrist': 'base/image_raw', 'image_topics.base': 'wrist/image_raw'}
    bench = sim(cameras=['wrist', 'base'], **swapped)
    bench.send(T0)
    answered(bench)
    seen = bench.policy.seen[0].images
    assert seen['wrist'][0, 0].tolist() == [10, 20, 30] and seen['base'][0, 0].tolist() == [20, 40, 60]


def test_v04_masked_camera_and_one_too_many(make_bench, capfd):
    bench = make_bench(cameras=['base', 'ceiling'], masked_cameras=['wrist'])
    assert bench.change('configure')
    assert 'no camera ceiling: not subscribed' in capfd.readouterr().err
    assert list(bench.node._buffer.streams) == ['base']


@pytest.mark.parametrize('offered', list(ReliabilityPolicy)[1:3])
def test_v06_images_come_from_publishers_of_either_reliability(make_bench, offered):
    bench = make_bench()
    assert bench.change('configure')
    publisher = bench.robot.create_publisher(Image, 'base/image_raw', QoSProfile(depth=1, reliability=offered))
    bench.until(lambda: (publisher.publish(sentinel(1)), bench.node._buffer.streams['base'].frames)[1], 'a frame')


def test_v06_reliability_mismatch_is_named(make_bench, capfd):
    strict = {'qos_overrides./strict/base/image_raw.subscription.reliability': 'reliable'}
    bench = make_bench(namespace='/strict', max_age_s=60.0, **strict)
    for publisher in bench.images.values():
        bench.robot.destroy_publisher(publisher)
    lossy = QoSProfile(depth=1, reliability=ReliabilityPolicy.BEST_EFFORT)
    driver = bench.robot.create_publisher(Image, 'base/image_raw', lossy)
    assert bench.change('configure')
    found = diagnosis(bench, 'camera base', lambda s: s.level == b'\x02')
    assert 'RELIABILITY' in found.message and 'base/image_raw' in found.message
    assert capfd.readouterr().err.count(
        'a publisher on base/image_raw offers RELIABILITY BEST_EFFORT, asked for is RELIABLE') == 1
    bench.images['base'] = bench.robot.create_publisher(Image, 'base/image_raw', QoSProfile(depth=1))
    bench.until(lambda: (bench.send_image('base', bench.now_ns()), bench.node._buffer.streams['base'].frames)[1],
                'a frame of a publisher that fits')
    assert 'RELIABILITY' in diagnosis(bench, 'camera base', lambda s: s.level == b'\x01').message
    bench.robot.destroy_publisher(driver)
    assert diagnosis(bench, 'camera base', lambda s: s.level == b'\x00').message == 'fresh'


def test_v06_publisher_of_another_type_is_named(make_bench):
    """No event tells of it: rclpy has one, Fast DDS never raises it."""
    bench = make_bench()
    assert bench.change('configure')
    context = Context()  # a publisher of another process
    context.init()
    camera = Node('camera', namespace=bench.namespace, context=context)
    try:
        camera.create_publisher(CompressedImage, 'base/image_raw', 1)
        for publisher in bench.images.values():
            bench.robot.destroy_publisher(publisher)
        found = diagnosis(bench, 'camera base', lambda s: s.level == b'\x02')
        assert 'base/image_raw sends sensor_msgs/msg/CompressedImage, expected sensor_msgs/msg/Image' in found.message
    finally:
        camera.destroy_node()
        context.try_shutdown()


def test_v06_prompt_that_cannot_arrive_is_named(make_bench):
    """`ros2 topic pub` offers no transient local unless it is asked to."""
    bench = make_bench()
    bench.robot.create_publisher(String, 'prompt', QoSProfile(depth=1, durability=DurabilityPolicy.VOLATILE))
    assert bench.change('configure')
    found = diagnosis(bench, 'prompt', lambda s: s.level == b'\x01')
    assert 'offers DURABILITY VOLATILE, asked for is TRANSIENT_LOCAL' in found.message


def test_a_middleware_that_does_not_count_lost_messages_will_do(bench, monkeypatch):
    def without(*, event_type, **arguments):
        if event_type == event_handler.QoSSubscriptionEventType.RCL_SUBSCRIPTION_MESSAGE_LOST:
            raise event_handler.UnsupportedEventTypeError('not by this one')
        return EventHandler(event_type=event_type, **arguments)

    EventHandler = event_handler.EventHandler
    monkeypatch.setattr(event_handler, 'EventHandler', without)
    assert bench.change('configure'), bench.node.last_error


def test_v06_depth_can_be_overridden(make_bench):
    deep = {'qos_overrides./deep/joint_states.subscription.depth': 50}
    bench = make_bench(namespace='/deep', **deep)
    assert bench.change('configure')
    depths = {s.topic_name: s.qos_profile.depth for s in bench.node.subscriptions}
    assert (depths['/deep/joint_states'], depths['/deep/base/image_raw']) == (50, 1)


@pytest.mark.parametrize('frozen', ['silent', 'same stamp'])
def test_v07_frozen_camera_stops_calls_until_it_is_back(sim, frozen):
    """base at 30 Hz; wrist freezes at 2 s and is back at 3 s. The robot holds what it was last told."""
    bench = sim(max_age_s=0.3)
    asked_at, pose = [], np.zeros(7)
    bench.policy.gate = lambda policy: asked_at.append(policy.seen[-1].stamp_s - T0 / S)
    for number in range(100):
        now = T0 + number * FRAME
        there = number < 60 or number >= 90
        bench.send_time(now)
        if there or frozen == 'same stamp':
            bench.send_image('wrist', now if there else T0 + 59 * FRAME)
        bench.send_image('base', now)
        bench.send_joints(now, pose)
        bench.until(lambda now=now, there=there: arrived(bench, 'base', now) and (not there or arrived(
            bench, 'wrist', now)) and bench.node._buffer.ages_s(None, now)[0] == 0, 'arrival')
        settle(bench)
        bench.until(lambda: len(bench.trajectories) == len(asked_at), 'the trajectory')
        pose = np.array(bench.trajectories[-1].points[-1].positions)
        if number == 80:  # a start does not wait for the end of a chunk, so that age alone holds it back
            found = diagnosis(bench, 'camera wrist', lambda s: s.level == b'\x02')
            assert 'wrist/image_raw' in found.message and 'max_age_s' in found.message
            assert bench.trigger('start').success
            settle(bench)
    stopped, back = max(t for t in asked_at if t < 3 - 1e-6), min(t for t in asked_at if t >= 3 - 1e-6)
    assert 1.5 < stopped <= 2.3 and back <= 3.2
    resumed = bench.trajectories[asked_at.index(back)].points[0].positions
    held = bench.trajectories[asked_at.index(back) - 1].points[-1].positions
    np.testing.assert_allclose(resumed, held, atol=0.011)


def test_v07_camera_whose_clock_is_ahead_is_named(sim):
    bench = sim()
    bench.send_image('base', T0)
    bench.send_joints(T0, (0,) * 7)
    bench.send_image('wrist', T0 + S // 4)
    found = diagnosis(bench, 'camera wrist', lambda s: s.level == b'\x02')
    assert 'stamped 0.25 s in the future; synchronise the clocks' in found.message and bench.policy.seen == []


def test_v08_slow_policy_sees_the_newest_frame_and_each_is_decoded_once(sim, monkeypatch):
    """30 Hz images during calls of 0.5 s: ten calls, none on a frame older than 60 ms."""
    decoded, calls, answer = [], queue.Queue(), threading.Semaphore(0)
    decode = observe.decode_image

    def counted(message, topic, *others):
        decoded.append(topic)
        return decode(message, topic)

    monkeypatch.setattr(observe, 'decode_image', counted)

    def slow(policy):
        frames = {c: int(image[0, 0, 0]) for c, image in policy.seen[-1].images.items()}
        calls.put((bench.node.get_clock().now().nanoseconds, frames))
        assert answer.acquire(timeout=20)

    bench = sim(EchoPolicy(gate=slow), stall_timeout_s=60.0)

    def frame(number):
        now = T0 + number * FRAME
        bench.send_time(now)
        for camera in ('base', 'wrist'):
            image = stamp_message(Image(height=8, width=8, encoding='mono8', step=8), now)
            image.data = array.array('B', bytes([number] * 64))
            bench.images[camera].publish(image)
        bench.send_joints(now, (0,) * 7)
        bench.until(lambda: arrived(bench, 'base', now) and arrived(bench, 'wrist', now)
                    and bench.node._buffer.ages_s(None, now)[0] == 0, 'arrival')

    worker, number, made = bench.node._worker, 0, 0
    while number < 150:
        while calls.empty():  # until a frame is newer than the executed steps
            frame(number)
            number += 1
            bench.until(lambda: not calls.empty() or not (worker._news or worker._busy), 'a look at it')
        now_ns, frames = calls.get()
        made += 1
        assert all(now_ns - (T0 + n * FRAME) <= 0.06 * S for n in frames.values()), frames
        for _ in range(15):
            frame(number)
            number += 1
        assert calls.empty() and len(decoded) == 2 * made
        answer.release()
        answered(bench, made)
    assert made >= 5


def test_v09_observation_owns_its_pictures(sim):
    """What the policy was given does not change when the middleware writes the next frame into the same memory."""
    bench = sim()
    bench.send(T0)
    answered(bench)
    message = bench.node._buffer.streams['base'].latest.message
    assert not np.shares_memory(bench.policy.seen[0].images['base'], np.frombuffer(message.data, np.uint8))
    message.data[:] = array.array('B', [7] * len(message.data))
    assert bench.policy.seen[0].images['base'][0, 0].tolist() == [10, 20, 30]


def test_v10_frames_that_get_lost_show_as_a_rate(sim):
    """A camera of 30 Hz of which every third frame arrives."""
    bench = sim(camera_rate_hz=30.0)
    bench.send_image('base', T0)
    diagnosis(bench, 'camera base', lambda s: s.level == b'\x00' and values(s)['frames'] == '1')
    for number in range(1, 31):
        now = T0 + number * S // 10
        bench.send_time(now + S // 20)  # frames are always a little late
        bench.send_image('base', now)
        bench.until(lambda now=now: arrived(bench, 'base', now), 'the frame')
    found = diagnosis(bench, 'camera base', lambda s: 'Hz' in s.message)
    assert found.level == b'\x01' and '10.0 Hz, expected 30.0' in found.message and 'fastdds_shm' in found.message


def test_sources_further_apart_than_allowed(sim):
    bench = sim(max_skew_s=0.1)
    now = T0 + 2 * DT
    bench.send_time(now)
    bench.send_image('base', T0)
    bench.send_image('wrist', now)
    bench.send_joints(now, (0,) * 7)
    answered(bench)  # 0.1 s is allowed
    later = now + S
    bench.send_time(later)
    bench.send_image('base', later - S // 4)
    bench.send_image('wrist', later)
    bench.send_joints(later, (0,) * 7)
    found = diagnosis(bench, 'policy', lambda s: 'max_skew_s' in s.message)
    assert 'camera base on base/image_raw is 0.250 s behind' in found.message
    assert values(diagnosis(bench, 'joint states', lambda s: True))['skew_s'] == '0.250'
    assert bench.set(max_skew_s=0.0)[0].successful
    bench.send_joints(later, (0,) * 7)
    answered(bench, 2)
