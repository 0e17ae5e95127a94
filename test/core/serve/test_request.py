# SPDX-License-Identifier: Apache-2.0
"""Requests of openpi's environments become the observation they mean, and what is missing is named."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from rmuscle_core.errors import ObservationError, SettingsError
from rmuscle_core.serve.request import RequestMap

OPENPI = ('base_0_rgb', 'left_wrist_0_rgb')


def picture(seed=0, height=6, width=8):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def libero():
    return {'observation/image': picture(0), 'observation/wrist_image': picture(1), 'prompt': 'stack',
            'observation/state': np.arange(8.0)}


def test_libero_keys():
    seen = RequestMap.build(OPENPI).observation(libero())
    assert list(seen.images) == list(OPENPI) and seen.prompt == 'stack'
    assert np.array_equal(seen.images['base_0_rgb'], picture(0))
    assert np.array_equal(seen.images['left_wrist_0_rgb'], picture(1))
    assert seen.state.dtype == np.float32 and np.array_equal(seen.state, np.arange(8))


def test_droid_keys_join_the_state():
    seen = RequestMap.build(OPENPI).observation({
        'observation/exterior_image_1_left': picture(0), 'observation/wrist_image_left': picture(1), 'prompt': 'stack',
        'observation/joint_position': np.arange(7.0), 'observation/gripper_position': 0.5})
    assert seen.state.tolist() == [*range(7), 0.5]


def test_aloha_keys_nested_and_channels_first():
    images = {'cam_high': picture(0).transpose(2, 0, 1), 'cam_left_wrist': picture(1).transpose(2, 0, 1)}
    seen = RequestMap.build(OPENPI).observation({'images': images, 'state': [0.0] * 14, 'prompt': 'stack'})
    assert np.array_equal(seen.images['base_0_rgb'], picture(0)) and seen.state.shape == (14,)


@pytest.mark.parametrize('key', ['top', 'observation/top', 'images/top', 'observation.images.top'])
def test_own_camera_names(key):
    assert np.array_equal(RequestMap.build(['top']).observation(
        {key: picture(3), 'state': [1], 'task': 'go'}).images['top'], picture(3))


def test_a_mapping_given_is_the_only_one():
    requests = RequestMap.build(['top'], {'top': 'cams/ceiling'}, ['arm', 'hand'], 'default')
    seen = requests.observation({'cams': {'ceiling': picture(4)}, 'top': picture(5), 'arm': [1, 2], 'hand': [3]})
    assert np.array_equal(seen.images['top'], picture(4)) and seen.state.tolist() == [1, 2, 3]
    assert seen.prompt == 'default'
    with pytest.raises(ObservationError, match='no picture for camera top under cams/ceiling'):
        requests.observation({'top': picture(5), 'arm': [1, 2], 'hand': [3]})


def test_unknown_keys_are_ignored():
    asked = RequestMap.build(OPENPI).observation({**libero(), 'extra': object(), 'more': {'a': 1}})
    assert np.array_equal(asked.state, np.arange(8)) and list(asked.images) == list(OPENPI)


@pytest.mark.parametrize(('change', 'sentence'), [
    ({'observation/image': None}, 'observation/image must be uint8'),
    ({'observation/image': picture() / 255.0}, r'not float64 \[6, 8, 3\]'),
    ({'observation/image': picture()[..., :1]}, r'not uint8 \[6, 8, 1\]'),
    ({'observation/image': picture()[None]}, r'not uint8 \[1, 6, 8, 3\]'),
    ({'observation/state': 'abc'}, 'observation/state must be a list of numbers'),
    ({'observation/state': [[1], [2, 3]]}, 'observation/state must be a list of numbers'),
    ({'observation/state': [10 ** 400]}, 'observation/state must be a list of numbers'),
    ({'prompt': 3}, 'no text under prompt'), ({'prompt': ' '}, 'no text under prompt'),
    ({3: 'three'}, "the key '3'"),
    ({'deep': {'a': {'b': {'c': {'d': 1}}}}}, 'nested more than 4 deep'),
])
def test_what_does_not_fit_is_named(change, sentence):
    with pytest.raises(ObservationError, match=sentence):
        RequestMap.build(OPENPI).observation({**libero(), **change})


@pytest.mark.parametrize(('key', 'sentence'), [
    ('observation/wrist_image', 'no picture for camera left_wrist_0_rgb under .*--masked-camera left_wrist_0_rgb'),
    ('observation/state', 'no robot state under observation/state .*--state-key'), ('prompt', 'no text under prompt')])
def test_a_missing_key_is_named_with_what_to_do(key, sentence):
    request = libero()
    del request[key]
    with pytest.raises(ObservationError, match=sentence):
        RequestMap.build(OPENPI).observation(request)


def test_mapping_a_camera_of_nobody_is_refused():
    with pytest.raises(SettingsError, match='top'):
        RequestMap.build(OPENPI, {'top': 'x'})


numbers = arrays.arrays(st.sampled_from(['u1', 'f4', 'f8', 'i8', 'b1']),
                        arrays.array_shapes(min_dims=0, max_dims=4, min_side=0))
plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
anything = st.recursive(plain | numbers, lambda inner: st.lists(inner, max_size=3) |
                        st.dictionaries(st.text(max_size=3), inner, max_size=3), max_leaves=8)


@given(st.dictionaries(st.sampled_from([*libero(), 'images', 'state']), anything, max_size=4))
def test_any_values_are_an_observation_or_a_refusal(values):
    with suppress(ObservationError):
        seen = RequestMap.build(OPENPI).observation({**libero(), **values})
        assert seen.state.dtype == np.float32
        assert all(picture.dtype == np.uint8 and picture.shape[2] == 3 for picture in seen.images.values())
