# SPDX-License-Identifier: Apache-2.0
"""Whatever a camera driver sends becomes RGB, or is refused by name. V02, V03 and V09, with their siblings."""

from __future__ import annotations

import array
import struct
import warnings
import zlib

import cv2
import numpy as np
import pytest
import torch
from sensor_msgs.msg import CompressedImage, Image

from rmuscle_core.errors import ObservationError
from rmuscle_core.sensing.compressed import stored_size
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
def test_v02_encodings_and_row_padding(encoding, pad):
    decoded = decode_image(colour_image(encoding, pad), '/cam')
    expected = np.zeros((4, 6, 3), np.uint8)
    expected[1, 2] = (40, 40, 40) if encoding == 'mono8' else RGB
    np.testing.assert_array_equal(decoded, expected)
    assert decoded.dtype == np.uint8


def ycbcr(rgb):
    weights = np.array([[65.481, 128.553, 24.966], [-37.797, -74.203, 112.0], [112.0, -93.786, -18.214]])  # BT.601
    return dict(zip('yuv', np.round([16, 128, 128] + weights @ (np.array(rgb) / 255)).astype(np.uint8)))


@pytest.mark.parametrize(('encoding', 'order'), [('yuv422', 'uyvy'), ('uyvy', 'uyvy'), ('yuv422_yuy2', 'yuyv'),
                                                 ('yuyv', 'yuyv')])
@pytest.mark.parametrize('pad', [0, 7])
def test_v02_yuv422(encoding, order, pad):
    pair = ycbcr((200, 60, 40))
    rows = np.pad(np.tile(np.uint8([pair[letter] for letter in order]), (4, 3)), ((0, 0), (0, pad)))
    decoded = decode_image(message(encoding, rows, 6), '/cam')
    np.testing.assert_allclose(decoded.reshape(-1, 3).mean(0), (200, 60, 40), atol=3)


@pytest.mark.parametrize('pattern', ['rggb', 'bggr', 'gbrg', 'grbg'])
def test_v02_bayer_patterns(pattern):
    value = dict(zip('rgb', (200, 100, 50)))
    tile = np.uint8([[value[pattern[0]], value[pattern[1]]], [value[pattern[2]], value[pattern[3]]]])
    decoded = decode_image(message(f'bayer_{pattern}8', np.tile(tile, (4, 4)), 8), '/cam')
    np.testing.assert_array_equal(decoded[2:-2, 2:-2].reshape(-1, 3).mean(0), (200, 100, 50))


def test_v02_size_that_does_not_fit_is_refused_with_the_numbers():
    broken = colour_image('rgb8')
    broken.data = broken.data[:-1]
    with pytest.raises(ObservationError, match=r'/cam.*71 bytes.*6x4 rgb8.*step 18'):
        decode_image(broken, '/cam')


@pytest.mark.parametrize('encoding', ['16UC1', 'mono16', '32FC1', 'rgb16', 'bayer_rggb16', '8UC3', '', 'x' * 9999])
def test_v03_deep_images_and_colours_in_unknown_order_are_refused(encoding):
    with pytest.raises(ObservationError, match=f'^/cam: encoding .{encoding[:40]}') as refused:
        decode_image(message(encoding, np.zeros((4, 12), np.uint8), 6), '/cam')
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(('encoding', 'chroma'), [('nv12', 'uv'), ('nv21', 'vu')])
@pytest.mark.parametrize('pad', [0, 10])
def test_v02_two_plane_yuv(encoding, chroma, pad):
    pair = ycbcr((200, 60, 40))
    rows = np.full((6, 6 + pad), 255, np.uint8)
    rows[:4, :6], rows[4:, :6] = pair['y'], np.tile([pair[letter] for letter in chroma], 3)
    sent = message(encoding, rows, 6)
    sent.height = 4
    np.testing.assert_allclose(decode_image(sent, '/cam').reshape(24, 3), [(200, 60, 40)] * 24, atol=3)
    sent.height = 5
    with pytest.raises(ObservationError, match='/cam'):
        decode_image(sent, '/cam')


def test_v02_byte_order_says_nothing_about_bytes():
    sent = colour_image('bgr8')
    sent.is_bigendian = 1
    assert decode_image(sent, '/cam')[1, 2].tolist() == list(RGB)


@pytest.mark.parametrize(('field', 'value'), [
    ('height', 0), ('width', 0), ('height', 5), ('height', 2**32 - 1), ('width', 2**32 - 1), ('width', 7), ('step', 0),
    ('step', 17), ('step', 2**32 - 1)])
@pytest.mark.parametrize('encoding', ['rgb8', 'mono8'])
def test_v02_hostile_sizes_are_refused_before_anything_is_allocated(encoding, field, value):
    sent = colour_image(encoding)
    setattr(sent, field, value if encoding == 'rgb8' or value != 17 else 5)
    with pytest.raises(ObservationError, match=r'^/cam: [0-9]+ bytes do not make'):
        decode_image(sent, '/cam')


@pytest.mark.parametrize(('encoding', 'height', 'width'), [('yuyv', 4, 5), ('nv12', 3, 4), ('bayer_rggb8', 2, 4)])
def test_v02_sizes_that_the_encoding_cannot_have(encoding, height, width):
    step = width * (2 if encoding == 'yuyv' else 1)
    rows = height + height // 2 if encoding == 'nv12' else height
    sent = message(encoding, np.zeros((rows, step), np.uint8), width)
    sent.height = height
    with pytest.raises(ObservationError, match=r'/cam.*(odd|too small)'):
        decode_image(sent, '/cam')


def compressed(text, codec='.jpg', pixels=None):
    pixels = np.full((32, 32, 3), (60, 40, 20), np.uint8) if pixels is None else pixels  # BGR of (20, 40, 60)
    found = CompressedImage(format=text)
    found.data = array.array('B', cv2.imencode(codec, pixels)[1].tobytes())
    return found


@pytest.mark.parametrize('text', ['jpeg', 'jpg', 'rgb8; jpeg compressed bgr8', ''])
def test_v03_compressed_formats(text):
    np.testing.assert_allclose(decode_image(compressed(text), '/cam').reshape(-1, 3).mean(0), (20, 40, 60), atol=3)


def test_v03_compressed_in_rgb_order_grey_and_alpha():
    rgb = np.full((8, 8, 3), (20, 40, 60), np.uint8)
    assert decode_image(compressed('rgb8; png compressed rgb8', '.png', rgb), '/cam')[0, 0].tolist() == [20, 40, 60]
    grey = np.full((8, 8), 9, np.uint8)
    assert decode_image(compressed('png', '.png', grey), '/cam')[0, 0].tolist() == [9, 9, 9]
    alpha = np.full((8, 8, 4), (60, 40, 20, 5), np.uint8)
    assert decode_image(compressed('png', '.png', alpha), '/cam')[0, 0].tolist() == [20, 40, 60]


NOISE = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)


@pytest.mark.parametrize('codec', ['.jpg', '.png'])
@pytest.mark.parametrize('kept', [0, 1, 2, 8, 24, 200, 0.5, 0.9, -2])
def test_v03_frame_cut_off_in_transit_is_refused(codec, kept):
    whole = compressed('jpeg', codec, NOISE)
    kept = kept if isinstance(kept, int) else int(kept * len(whole.data))
    broken = CompressedImage(format='jpeg', data=whole.data[:kept])
    assert stored_size(broken.data.tobytes()) is None  # known before it is unpacked: OpenCV 4 paints the rest grey
    with pytest.raises(ObservationError, match=r'^/cam: [0-9]+ bytes of format .jpeg. are no readable JPEG or PNG'):
        decode_image(broken, '/cam')


def test_v03_bytes_behind_the_end_do_no_harm():
    padded = compressed('jpeg')
    padded.data.extend(b'\0' * 512 + b'trailer')
    np.testing.assert_allclose(decode_image(padded, '/cam').reshape(-1, 3).mean(0), (20, 40, 60), atol=3)


@pytest.mark.parametrize(('broken', 'reason'), [
    (compressed('png', '.png', np.full((8, 8), 1000, np.uint16)), 'uint16'),
    (compressed('png', '.png', np.full((8, 8, 3), 1000, np.uint16)), 'uint16'),
    (compressed('16UC1; compressedDepth png', '.png', np.full((8, 8), 1000, np.uint16)), 'depth'),
    (compressed('bayer_rggb8; jpeg compressed ', '.jpg', np.full((8, 8), 9, np.uint8)), 'Bayer mosaic'),
    (CompressedImage(format='jpeg', data=array.array('B', b'no picture at all' * 99)), 'no readable'),
    (compressed('tiff', '.bmp'), 'no readable')])
def test_v03_other_compressed_pictures_are_refused_by_name(broken, reason):
    with pytest.raises(ObservationError, match=f'^/cam: .*{reason}'):
        decode_image(broken, '/cam')


def png_that_says(width, height):
    def chunk(kind, data):
        return struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))
    header = struct.pack('>IIBBBBB', width, height, 8, 2, 0, 0, 0)
    chunks = chunk(b'IHDR', header), chunk(b'IDAT', zlib.compress(bytes(99))), chunk(b'IEND', b'')
    return b'\x89PNG\r\n\x1a\n' + b''.join(chunks)


def jpeg_that_says(width, height):
    data = bytearray(cv2.imencode('.jpg', NOISE)[1].tobytes())
    at = data.index(b'\xff\xc0') + 5
    data[at:at + 4] = struct.pack('>HH', height, width)
    return bytes(data)


@pytest.mark.parametrize('data', [png_that_says(30_000, 30_000), png_that_says(2**31 - 1, 2**31 - 1),
                                  jpeg_that_says(65_000, 65_000)])
def test_v03_a_few_bytes_cannot_ask_for_gigabytes(data, monkeypatch):
    monkeypatch.setattr(cv2, 'imdecode', lambda *_: pytest.fail('unpacked before its size was judged'))
    with pytest.raises(ObservationError, match=r'/cam.*more than 50000000 pixels'):
        decode_image(CompressedImage(format='png', data=array.array('B', data)), '/cam')


@pytest.mark.parametrize('data', [png_that_says(0, 0), png_that_says(100, 100), jpeg_that_says(64, 0)])
def test_v03_header_that_the_bytes_do_not_keep(data):
    with pytest.raises(ObservationError, match='/cam'):
        decode_image(CompressedImage(format='png', data=array.array('B', data)), '/cam')


def test_v03_exif_does_not_rotate():
    """A camera that is mounted on its side was mounted so in training too."""
    plain = compressed('jpeg', pixels=NOISE[:, :32])
    data = bytes(plain.data)
    tag = b'II*\0' + struct.pack('<IHHHIHHI', 8, 1, 0x112, 3, 1, 6, 0, 0)  # orientation 6: a quarter turn
    segment = b'Exif\0\0' + tag
    turned = CompressedImage(format='jpeg')
    turned.data = array.array('B', data[:2] + b'\xff\xe1' + struct.pack('>H', len(segment) + 2) + segment + data[2:])
    assert cv2.imdecode(np.frombuffer(turned.data, np.uint8), cv2.IMREAD_COLOR).shape[:2] == (32, 64)  # it is read
    np.testing.assert_array_equal(decode_image(turned, '/cam'), decode_image(plain, '/cam'))


@pytest.mark.parametrize('source', [*map(colour_image, ('rgb8', 'bgr8', 'rgba8', 'mono8')), compressed('jpeg'),
                                    compressed('png', '.png', np.full((8, 8), 9, np.uint8))])
def test_v09_result_owns_its_memory(source):
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        decoded = decode_image(source, '/cam')
        tensor = torch.from_numpy(decoded)
    before = decoded.copy()
    source.data[:] = array.array('B', [7] * len(source.data))
    np.testing.assert_array_equal(tensor.numpy(), before)
    assert decoded.flags.writeable


@pytest.mark.parametrize('encoding', ['rgb8', 'bgr8', 'rgba8', 'bgra8', 'mono8'])
def test_agrees_with_cv_bridge_where_it_imports(encoding):
    bridge = pytest.importorskip('cv_bridge', exc_type=Exception).CvBridge()  # built against numpy 1.x it fails oddly
    source = colour_image(encoding)
    np.testing.assert_array_equal(decode_image(source, '/cam'), bridge.imgmsg_to_cv2(source, 'rgb8'))
