# SPDX-License-Identifier: Apache-2.0
"""Whatever a camera driver sends becomes RGB, or is refused by name."""

from __future__ import annotations

import array

import cv2
import numpy as np
import pytest
from sensor_msgs.msg import CompressedImage, Image

from rmuscle_core.errors import ObservationError
from rmuscle_core.sensing.image import decode_image

RGB = (10, 20, 30)


def colour_image(encoding, pad=0, height=4, width=6):
    """An image that is black but for pixel (row 1, column 2)."""
    bgr = RGB[::-1]
    channels = {'rgb8': RGB, 'bgr8': bgr, 'rgba8': (*RGB, 77), 'bgra8': (*bgr, 77), 'mono8': (40,)}[encoding]
    rows = np.zeros((height, width * len(channels) + pad), np.uint8)
    rows[:, width * len(channels):] = 255
    rows[1, 2 * len(channels):3 * len(channels)] = channels
    return message(encoding, rows, width)


def message(encoding, rows, width):
    found = Image(encoding=encoding, height=len(rows), width=width, step=rows.shape[1])
    found.data = array.array('B', rows.tobytes())
    return found


@pytest.mark.parametrize('pad', [0, 12, 1])
@pytest.mark.parametrize('encoding', ['rgb8', 'bgr8', 'rgba8', 'bgra8', 'mono8'])
def test_encodings_and_row_padding(encoding, pad):
    decoded = decode_image(colour_image(encoding, pad), '/cam')
    expected = np.zeros((4, 6, 3), np.uint8)
    expected[1, 2] = (40, 40, 40) if encoding == 'mono8' else RGB
    np.testing.assert_array_equal(decoded, expected)
    assert decoded.dtype == np.uint8


@pytest.mark.parametrize(('encoding', 'order'), [('yuv422', 'uyvy'), ('uyvy', 'uyvy'), ('yuv422_yuy2', 'yuyv'),
                                                 ('yuyv', 'yuyv')])
def test_yuv422(encoding, order):
    weights = np.array([[65.481, 128.553, 24.966], [-37.797, -74.203, 112.0], [112.0, -93.786, -18.214]])  # BT.601
    luma, blue, red = np.round([16, 128, 128] + weights @ (np.array([200, 60, 40]) / 255))
    pair = {'u': blue, 'v': red, 'y': luma}
    rows = np.tile(np.uint8([pair[letter] for letter in order]), (4, 3))
    decoded = decode_image(message(encoding, rows, 6), '/cam')
    np.testing.assert_allclose(decoded.reshape(-1, 3).mean(0), (200, 60, 40), atol=3)


@pytest.mark.parametrize('pattern', ['rggb', 'bggr', 'gbrg', 'grbg'])
def test_bayer_patterns(pattern):
    value = dict(zip('rgb', (200, 100, 50)))
    tile = np.uint8([[value[pattern[0]], value[pattern[1]]], [value[pattern[2]], value[pattern[3]]]])
    decoded = decode_image(message(f'bayer_{pattern}8', np.tile(tile, (4, 4)), 8), '/cam')
    np.testing.assert_array_equal(decoded[2:-2, 2:-2].reshape(-1, 3).mean(0), (200, 100, 50))


def test_size_that_does_not_fit_is_refused_with_the_numbers():
    broken = colour_image('rgb8')
    broken.data = broken.data[:-1]
    with pytest.raises(ObservationError, match=r'/cam.*71 bytes.*6x4 rgb8.*step 18'):
        decode_image(broken, '/cam')


@pytest.mark.parametrize('encoding', ['16UC1', 'mono16', '32FC1', 'rgb16'])
def test_deep_images_are_refused_not_cut_to_8_bit(encoding):
    with pytest.raises(ObservationError, match=f'/cam.*{encoding}'):
        decode_image(message(encoding, np.zeros((4, 12), np.uint8), 6), '/cam')


def compressed(text, codec='.jpg', pixels=None):
    pixels = np.full((32, 32, 3), (60, 40, 20), np.uint8) if pixels is None else pixels  # BGR of (20, 40, 60)
    found = CompressedImage(format=text)
    found.data = array.array('B', cv2.imencode(codec, pixels)[1].tobytes())
    return found


@pytest.mark.parametrize('text', ['jpeg', 'jpg', 'rgb8; jpeg compressed bgr8', ''])
def test_compressed_formats(text):
    np.testing.assert_allclose(decode_image(compressed(text), '/cam').reshape(-1, 3).mean(0), (20, 40, 60), atol=3)


def test_compressed_in_rgb_order_grey_and_alpha():
    rgb = np.full((8, 8, 3), (20, 40, 60), np.uint8)
    assert decode_image(compressed('rgb8; png compressed rgb8', '.png', rgb), '/cam')[0, 0].tolist() == [20, 40, 60]
    grey = np.full((8, 8), 9, np.uint8)
    assert decode_image(compressed('png', '.png', grey), '/cam')[0, 0].tolist() == [9, 9, 9]
    alpha = np.full((8, 8, 4), (60, 40, 20, 5), np.uint8)
    assert decode_image(compressed('png', '.png', alpha), '/cam')[0, 0].tolist() == [20, 40, 60]


def test_broken_and_deep_compressed_images_are_refused():
    truncated = compressed('jpeg', pixels=np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))
    truncated.data = truncated.data[:200]
    empty = CompressedImage(format='jpeg')
    deep = compressed('png', '.png', np.full((8, 8), 1000, np.uint16))
    depth = compressed('16UC1; compressedDepth png', '.png', np.full((8, 8), 1000, np.uint16))
    for broken, reason in ((truncated, 'no readable'), (empty, 'no readable'), (deep, 'uint16'), (depth, 'depth')):
        with pytest.raises(ObservationError, match=f'/cam.*{reason}'):
            decode_image(broken, '/cam')


@pytest.mark.parametrize('encoding', ['rgb8', 'bgr8', 'mono8'])
def test_result_owns_its_memory(encoding):
    source = colour_image(encoding)
    decoded = decode_image(source, '/cam')
    before = decoded.copy()
    source.data[:] = array.array('B', [7] * len(source.data))
    np.testing.assert_array_equal(decoded, before)
    assert decoded.flags.writeable


@pytest.mark.parametrize('encoding', ['rgb8', 'bgr8', 'rgba8', 'bgra8', 'mono8'])
def test_agrees_with_cv_bridge_where_it_imports(encoding):
    bridge = pytest.importorskip('cv_bridge', exc_type=Exception).CvBridge()  # built against numpy 1.x it fails oddly
    source = colour_image(encoding)
    np.testing.assert_array_equal(decode_image(source, '/cam'), bridge.imgmsg_to_cv2(source, 'rgb8'))
