# SPDX-License-Identifier: Apache-2.0
"""sensor_msgs/Image and CompressedImage to RGB arrays.

One converter of our own for live use, bags and tests, so that the same bytes give the same picture everywhere. The node
asks cv_bridge for the encodings that are not in these tables: it has no wheel, its Jazzy build needs numpy 1.x, and it
misreads rows whose padding is no whole number of pixels, so it cannot be the one converter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cv2
import numpy as np

from rmuscle_core.errors import ObservationError
from rmuscle_core.sensing.compressed import decode_compressed

# encoding -> (bytes per pixel, OpenCV conversion to RGB or None). ROS names a Bayer pattern by its first row, OpenCV
# by its second row, second column onwards. 8UC3 and 8UC4 are left out: they do not say which channel is red.
PACKED = {
    'rgb8': (3, None), 'bgr8': (3, cv2.COLOR_BGR2RGB),
    'rgba8': (4, cv2.COLOR_RGBA2RGB), 'bgra8': (4, cv2.COLOR_BGRA2RGB),
    'mono8': (1, cv2.COLOR_GRAY2RGB), '8UC1': (1, cv2.COLOR_GRAY2RGB),
    'yuv422': (2, cv2.COLOR_YUV2RGB_UYVY), 'uyvy': (2, cv2.COLOR_YUV2RGB_UYVY),
    'yuv422_yuy2': (2, cv2.COLOR_YUV2RGB_YUY2), 'yuyv': (2, cv2.COLOR_YUV2RGB_YUY2),
    'bayer_rggb8': (1, cv2.COLOR_BayerBG2RGB), 'bayer_bggr8': (1, cv2.COLOR_BayerRG2RGB),
    'bayer_gbrg8': (1, cv2.COLOR_BayerGR2RGB), 'bayer_grbg8': (1, cv2.COLOR_BayerGB2RGB),
}
# A plane of brightness, and below it one of colour with half as many rows; ``step`` is that of one row of either.
PLANAR = {'nv12': cv2.COLOR_YUV2RGB_NV12, 'nv21': cv2.COLOR_YUV2RGB_NV21}

Converter = Callable[[Any, str], 'np.ndarray | None']  # (Image, topic) -> uint8 [h, w, 3] RGB, None for "not mine"


def decode_image(message: Any, topic: str, other: Converter | None = None) -> np.ndarray:
    """Return uint8 [h, w, 3] RGB in memory of its own (the message may be reused at once).

    message: sensor_msgs Image or CompressedImage, from rclpy or rosbags. other: asked for encodings that are not known
    here. Raises ObservationError naming the topic.
    """
    if hasattr(message, 'format'):
        return decode_compressed(np.frombuffer(message.data, np.uint8), message.format, topic)
    encoding, width = message.encoding, int(message.width)
    depth, code = PACKED.get(encoding) or (1, PLANAR.get(encoding))
    if encoding not in PACKED and encoding not in PLANAR:
        picture = other(message, topic) if other else None
        if picture is not None:
            return picture
        raise ObservationError(f'{topic}: encoding {encoding[:40]!r} is no 8-bit picture of known colours; publish '
                               f'one of {", ".join([*PACKED, *PLANAR])}')
    rows = _rows(message, topic, depth)[:, :width * depth]
    pixels = rows if depth == 1 else rows.reshape(len(rows), width, depth)
    if code is None:
        return pixels.copy()
    return cv2.cvtColor(np.ascontiguousarray(pixels), code)


def _rows(message: Any, topic: str, depth: int) -> np.ndarray:
    """View the message's bytes as [rows, step]; refuses sizes that the bytes do not make."""
    encoding, height, width, step = message.encoding, int(message.height), int(message.width), int(message.step)
    data = np.frombuffer(message.data, np.uint8)
    planar = encoding in PLANAR
    rows = height + height // 2 if planar else height
    if not height or not width or step < width * depth or len(data) != step * rows:
        raise ObservationError(f'{topic}: {len(data)} bytes do not make a {width}x{height} {encoding} image '
                               f'with step {step} (expected step >= {width * depth}, {rows} rows of step bytes); '
                               'check the camera driver')
    if ((depth == 2 or planar) and width % 2) or (planar and height % 2):
        raise ObservationError(f'{topic}: a side of this {width}x{height} {encoding} image is odd, but its pixels '
                               'share colour in pairs; choose another size or encoding in the camera driver')
    if encoding.startswith('bayer') and min(height, width) < 3:
        raise ObservationError(f'{topic}: {width}x{height} is too small for a Bayer mosaic; check the camera driver')
    return data.reshape(rows, step)
