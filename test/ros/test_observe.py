# SPDX-License-Identifier: Apache-2.0
"""An observation is made of fresh samples only, of any publishers, in the checkpoint's order and units."""

from __future__ import annotations

import array

import cv2
import numpy as np
import pytest
from conftest import ARM7, sentinel, stamp_message
from sensor_msgs.msg import CompressedImage, JointState

from rmuscle_core.errors import ObservationError, SettingsError
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


def test_any_stream_too_old_stops_the_observation_and_is_named(buffer):
    assert buffer.take('lift', NOW + 300 * MS) is not None
    later = NOW + 310 * MS
    assert buffer.take('lift', later) is None
    assert 'base' in buffer.problem(later) and '/c0' in buffer.problem(later) and '0.31' in buffer.problem(later)
    buffer.add_image('base', stamp_message(sentinel(1), later), later)
    buffer.add_joint_state(joints(range(7), later), later)
    assert 'wrist' in buffer.problem(later)


def test_old_stamp_counts_even_if_the_message_just_arrived(buffer):
    buffer.add_image('wrist', stamp_message(sentinel(2), NOW - 400 * MS), NOW)
    assert buffer.take('lift', NOW) is None


def test_stamp_in_the_future_is_refused(buffer):
    buffer.add_joint_state(joints(range(7), NOW + 900 * MS), NOW)
    assert buffer.take('lift', NOW) is None and 'future' in buffer.problem(NOW)


def test_zero_stamp_is_taken_at_arrival(buffer):
    buffer.add_image('base', sentinel(1), NOW + 200 * MS)
    assert buffer.streams['base'].latest.stamp_ns == NOW + 200 * MS


def test_nothing_from_before_the_end_of_the_chunk(buffer):
    assert buffer.take('lift', NOW, not_before_ns=NOW) is not None
    assert buffer.take('lift', NOW, not_before_ns=NOW + 1) is None


def test_several_joint_publishers_are_merged(buffer):
    buffer.clear()
    for camera in ('base', 'wrist'):
        buffer.add_image(camera, stamp_message(sentinel(1), NOW), NOW)
    buffer.add_joint_state(joints([.5, .9], NOW, ['j5', 'gripper']), NOW)
    assert 'j1, j2, j3, j4, j6' in buffer.problem(NOW)
    buffer.add_joint_state(joints([.6, .4, .3, 7, .2, .1], NOW - 5, ['j6', 'j4', 'j3', 'wheel', 'j2', 'j1']), NOW)
    snapshot = buffer.take('lift', NOW)
    np.testing.assert_allclose(snapshot.measured, [.1, .2, .3, .4, .5, .6, .9])
    assert snapshot.stamp_ns == NOW - 5


def test_position_that_is_not_a_number_is_never_used(buffer):
    later = NOW + 250 * MS
    buffer.add_joint_state(joints([9, 9, float('nan'), 9, 9, 9, 9], later), later)
    assert buffer.measured(later).tolist() == [9, 9, 2, 9, 9, 9, 9]
    too_late = NOW + 310 * MS
    assert buffer.measured(too_late) is None
    for camera in ('base', 'wrist'):
        buffer.add_image(camera, stamp_message(sentinel(1), too_late), too_late)
    assert buffer.problem(too_late).startswith('joint j3 on joint_states')


def test_names_without_positions(buffer):
    buffer.add_joint_state(JointState(name=['j1'], velocity=[1.0]), NOW)
    with pytest.raises(ObservationError, match='joint_states: 1 positions for 2 names'):
        buffer.add_joint_state(JointState(name=['j1', 'j2'], position=[1.0]), NOW)
    assert buffer.samples.messages_bad == 1 and buffer.measured(NOW).tolist() == list(range(7))


def test_broken_frame_is_dropped_and_the_one_before_keeps_its_age(buffer):
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


def test_degrees_and_gripper_range_convert_both_ways():
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
