# SPDX-License-Identifier: Apache-2.0
"""An observation is made of fresh samples only, of any publishers, in the checkpoint's order and units."""

from __future__ import annotations

import array

import cv2
import numpy as np
import pytest
from robot_bench import ARM7, sentinel, stamp_message
from sensor_msgs.msg import CompressedImage, JointState

from rmuscle_core.errors import ObservationError, SettingsError
from rmuscle_core.sensing import observe
from rmuscle_core.sensing.image import decode_image
from rmuscle_core.sensing.joints import JointMap
from rmuscle_core.sensing.observe import ObservationBuffer

NOW = 100_000_000_000
MS = 1_000_000
INFINITY = float('inf')


def joint_map(names=ARM7, scale=(1.0,), offset=(0.0,), lower=(-INFINITY,), upper=(INFINITY,), jump=(INFINITY,)):
    return JointMap.build(names, scale, offset, lower, upper, jump)


def joints(positions, stamp_ns=NOW, names=ARM7):
    return stamp_message(JointState(name=list(names), position=[float(p) for p in positions]), stamp_ns)


@pytest.fixture
def buffer():
    """A buffer whose streams are all fresh at NOW."""
    found = ObservationBuffer(joint_map(), {'base': '/c0', 'wrist': '/c1'}, max_age_s=0.3)
    for level, camera in enumerate(('base', 'wrist'), 1):
        found.add_image(camera, stamp_message(sentinel(level), NOW), NOW)
    found.add_joint_state(joints(range(7)), NOW)
    return found


def test_observation_holds_each_camera_in_its_slot(buffer):
    snapshot = buffer.take('lift', NOW)
    assert snapshot.observation.images['base'][0, 0].tolist() == [10, 20, 30]
    assert snapshot.observation.images['wrist'][0, 0].tolist() == [20, 40, 60]
    assert snapshot.observation.state.tolist() == list(range(7)) and snapshot.observation.state.dtype == np.float32
    assert (snapshot.stamp_ns, snapshot.observation.stamp_s, snapshot.observation.prompt) == (NOW, 100.0, 'lift')


def test_v07_any_stream_too_old_stops_the_observation_and_is_named(buffer):
    assert buffer.take('lift', NOW + 300 * MS) is not None
    later = NOW + 310 * MS
    assert buffer.take('lift', later) is None
    assert 'base' in buffer.problem(later) and '/c0' in buffer.problem(later) and '0.31' in buffer.problem(later)
    buffer.add_image('base', stamp_message(sentinel(1), later), later)
    buffer.add_joint_state(joints(range(7), later), later)
    assert 'wrist' in buffer.problem(later)


def test_v07_old_stamp_counts_even_if_the_message_just_arrived(buffer):
    buffer.add_image('wrist', stamp_message(sentinel(2), NOW - 400 * MS), NOW)
    assert buffer.take('lift', NOW) is None


@pytest.mark.parametrize('source', ['wrist', 'joints'])
def test_stamp_of_a_clock_that_is_ahead_is_refused_until_it_has_come(buffer, source):
    ahead = NOW + 150 * MS
    if source == 'wrist':
        buffer.add_image('wrist', stamp_message(sentinel(2), ahead), NOW)
    else:
        buffer.add_joint_state(joints(range(7), ahead), NOW)
    assert buffer.take('lift', NOW) is None
    assert 'stamped 0.15 s in the future; synchronise the clocks' in buffer.problem(NOW)
    assert buffer.take('lift', NOW + 60 * MS) is not None  # sim time comes in steps: the clock may catch up


def test_zero_stamp_is_taken_at_arrival(buffer):
    later = NOW + 200 * MS
    buffer.add_image('base', sentinel(1), later)
    buffer.add_joint_state(JointState(name=list(ARM7), position=[0.0] * 7), later)
    assert buffer.ages_s('base', later) == buffer.ages_s(None, later) == (0, 0)
    assert buffer.take('lift', later).stamp_ns == later


def test_nothing_from_before_the_end_of_the_chunk(buffer):
    assert buffer.take('lift', NOW, not_before_ns=NOW) is not None
    assert buffer.take('lift', NOW, not_before_ns=NOW + 1) is None


def test_v01_several_joint_publishers_are_merged(buffer):
    buffer.clear()
    for camera in ('base', 'wrist'):
        buffer.add_image(camera, stamp_message(sentinel(1), NOW), NOW)
    buffer.add_joint_state(joints([.5, .9], NOW, ['j5', 'gripper']), NOW)
    assert 'j1, j2, j3, j4, j6' in buffer.problem(NOW)
    buffer.add_joint_state(joints([.6, .4, .3, 7, .2, .1], NOW - 5, ['j6', 'j4', 'j3', 'wheel', 'j2', 'j1']), NOW)
    snapshot = buffer.take('lift', NOW)
    np.testing.assert_allclose(snapshot.measured, [.1, .2, .3, .4, .5, .6, .9])
    assert snapshot.stamp_ns == NOW - 5


@pytest.mark.parametrize('value', [float('nan'), float('inf'), -float('inf')])
def test_position_that_is_not_a_number_is_never_used(buffer, value):
    later = NOW + 250 * MS
    buffer.add_joint_state(joints([9, 9, value, 9, 9, 9, 9], later), later)
    assert buffer.measured(later).tolist() == [9, 9, 2, 9, 9, 9, 9]
    too_late = NOW + 310 * MS
    assert buffer.measured(too_late) is None
    for camera in ('base', 'wrist'):
        buffer.add_image(camera, stamp_message(sentinel(1), too_late), too_late)
    assert buffer.problem(too_late).startswith('joint j3 on joint_states')


@pytest.mark.parametrize(('names', 'positions', 'problem'), [
    (['j1', 'j2'], [1.0], '1 positions for 2 names'), ([], [1.0], '1 positions for 0 names'),
    (['j1'], [1.0, 2.0], '2 positions for 1 names'), (['j1', 'wheel', 'j1'], [1.0, 2.0, 3.0], 'joint j1 twice')])
def test_joint_message_that_does_not_add_up_is_dropped_whole(buffer, names, positions, problem):
    with pytest.raises(ObservationError, match=f'^joint_states: {problem}'):
        buffer.add_joint_state(JointState(name=names, position=positions), NOW)
    assert buffer.samples.messages_bad == 1 and buffer.measured(NOW).tolist() == list(range(7))


@pytest.mark.parametrize('message', [JointState(), JointState(name=['j1'], velocity=[1.0]),
                                     JointState(name=['wheel', 'wheel'], position=[1.0, 2.0])])
def test_joint_message_without_a_position_of_ours_changes_nothing(buffer, message):
    buffer.add_joint_state(message, NOW + 200 * MS)
    assert buffer.measured(NOW).tolist() == list(range(7)) and buffer.samples.messages_bad == 0
    assert buffer.ages_s(None, NOW) == (0, 0)


def test_each_joint_has_the_age_of_its_own_publisher(buffer):
    """Stamp and arrival count apart: the gripper's stamps are behind, the arm's messages came late."""
    late = NOW + 290 * MS
    buffer.add_joint_state(joints([9] * 6, late, ARM7[:6]), NOW + 10 * MS)
    buffer.add_joint_state(joints([9], NOW + 20 * MS, ['gripper']), late)
    assert buffer.samples.problem(NOW + 310 * MS, buffer.max_age_ns) == ''
    assert buffer.samples.problem(NOW + 315 * MS, buffer.max_age_ns).startswith('joint j1 on joint_states is 0.3')
    buffer.add_joint_state(joints([9] * 6, late, ARM7[:6]), late)
    assert buffer.samples.problem(NOW + 330 * MS, buffer.max_age_ns).startswith('joint gripper on joint_states is 0.31')
    assert buffer.ages_s(None, late) == (0.27, 0.0)


def test_v03_broken_frame_is_dropped_and_the_one_before_keeps_its_age(buffer):
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    data = cv2.imencode('.jpg', noise)[1].tobytes()
    good, broken = (stamp_message(CompressedImage(format='jpeg', data=array.array('B', data[:n])), stamp)
                    for n, stamp in ((len(data), NOW), (200, NOW + 100 * MS)))
    buffer.add_image('wrist', good, NOW)
    assert buffer.take('lift', NOW) is not None
    buffer.add_image('wrist', broken, NOW + 100 * MS)
    with pytest.raises(ObservationError, match='/c1'):
        buffer.take('lift', NOW + 100 * MS)
    stream = buffer.streams['wrist']
    assert stream.frames_bad == 1 and stream.latest.message is good and stream.latest.stamp_ns == NOW
    assert buffer.take('lift', NOW + 100 * MS) is not None
    assert buffer.take('lift', NOW + 100 * MS, not_before_ns=NOW + 1) is None


def test_v17_v18_degrees_and_gripper_range_convert_both_ways():
    mapping = joint_map(('arm', 'gripper'), scale=(np.pi / 180, -0.08), offset=(0.0, 0.08))
    np.testing.assert_allclose(mapping.to_policy(np.array([np.pi / 2, 0.08])), [90, 0])
    np.testing.assert_allclose(mapping.to_robot([[90, 0], [0, 1], [45, 0.25]]),
                               [[np.pi / 2, 0.08], [0, 0], [np.pi / 4, 0.06]], atol=1e-12)
    robot = np.array([0.123456789, 0.0123])
    assert np.abs(mapping.to_robot(mapping.to_policy(robot)) - robot).max() < 1e-9


@pytest.mark.parametrize(('options', 'name'), [
    ({'names': ()}, 'joint_names'), ({'names': ('a', 'b', 'a')}, 'joint_names lists a more than once'),
    ({'scale': (0.0,)}, 'joint_scale'), ({'offset': (INFINITY,)}, 'joint_offset'),
    ({'scale': (1.0, 2.0)}, 'joint_scale has 2'),
    ({'lower': (1.0,), 'upper': (1.0,)}, 'joint_lower of j1')])
def test_joint_parameters_that_make_no_sense_are_refused_by_name(options, name):
    with pytest.raises(SettingsError, match=name):
        joint_map(**options)


def test_v08_no_frame_is_decoded_twice(buffer, monkeypatch):
    decoded = []

    def counted(message, topic, *others):
        decoded.append(topic)
        return decode_image(message, topic)

    monkeypatch.setattr(observe, 'decode_image', counted)
    broken = stamp_message(sentinel(2), NOW + MS)
    broken.data = broken.data[:-1]
    buffer.add_image('wrist', broken, NOW + MS)
    with pytest.raises(ObservationError):
        buffer.take('lift', NOW + MS)
    assert buffer.take('lift', NOW + MS) is None  # no frame of the wrist has ever decoded
    buffer.add_image('wrist', stamp_message(sentinel(2), NOW + MS), NOW + MS)
    assert buffer.take('lift', NOW + MS) is not None
    assert decoded == ['/c0', '/c1', '/c1']


def test_frame_decoded_while_the_buffer_is_cleared_does_not_come_back(buffer, monkeypatch):
    def clear_meanwhile(message, topic, *others):
        buffer.clear()
        return decode_image(message, topic)

    monkeypatch.setattr(observe, 'decode_image', clear_meanwhile)
    assert buffer.take('lift', NOW) is not None  # the worker drops what comes of it
    monkeypatch.undo()
    broken = stamp_message(sentinel(2), NOW)
    broken.data = broken.data[:-1]
    buffer.add_image('base', stamp_message(sentinel(1), NOW), NOW)
    buffer.add_image('wrist', broken, NOW)
    buffer.add_joint_state(joints(range(7)), NOW)
    with pytest.raises(ObservationError):
        buffer.take('lift', NOW)
    assert buffer.problem(NOW) == 'no image yet for camera wrist on /c1'


def test_skew_is_reported_and_may_be_limited(buffer):
    assert buffer.skew_s() == 0
    buffer.add_image('wrist', stamp_message(sentinel(2), NOW + 200 * MS), NOW + 200 * MS)
    assert buffer.skew_s() == 0.2 and buffer.take('lift', NOW + 200 * MS) is not None
    buffer.limit(0.3, 0.15)
    assert buffer.take('lift', NOW + 200 * MS) is None
    assert buffer.problem(NOW + 200 * MS) == ('camera base on /c0 is 0.200 s behind camera wrist on /c1, max_skew_s is '
                                              '0.150')
    buffer.clear()
    assert buffer.skew_s() == INFINITY


def test_messages_are_added_by_topic():
    buffer = ObservationBuffer(joint_map(), {'base': '/c0', 'wrist': '/c0'}, 0.3, joint_topic='/arm/joint_states')
    assert buffer.add('/c0', stamp_message(sentinel(1), NOW), NOW)
    assert buffer.add('/arm/joint_states', joints(range(7)), NOW)
    assert not buffer.add('/joint_states', joints(range(7)), NOW)
    assert sorted(buffer.take('lift', NOW).observation.images) == ['base', 'wrist']
