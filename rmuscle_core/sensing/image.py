# SPDX-License-Identifier: Apache-2.0
"""sensor_msgs/Image and CompressedImage to RGB arrays.

One converter of our own for live use, bags and tests, so that the same bytes give the same picture everywhere.
cv_bridge is no part of it: it has no wheel, its Jazzy build needs numpy 1.x, and it misreads rows whose padding is no
whole number of pixels.
"""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np

from rmuscle_core.errors import ObservationError

# encoding -> (bytes per pixel, OpenCV conversion to RGB or None). ROS names a Bayer pattern by its first row, OpenCV
# by its second row, second column onwards.
ENCODINGS = {
    'rgb8': (3, None), 'bgr8': (3, cv2.COLOR_BGR2RGB), '8UC3': (3, cv2.COLOR_BGR2RGB),
    'rgba8': (4, cv2.COLOR_RGBA2RGB), 'bgra8': (4, cv2.COLOR_BGRA2RGB),
    'mono8': (1, cv2.COLOR_GRAY2RGB), '8UC1': (1, cv2.COLOR_GRAY2RGB),
    'yuv422': (2, cv2.COLOR_YUV2RGB_UYVY), 'uyvy': (2, cv2.COLOR_YUV2RGB_UYVY),
    'yuv422_yuy2': (2, cv2.COLOR_YUV2RGB_YUY2), 'yuyv': (2, cv2.COLOR_YUV2RGB_YUY2),
    'bayer_rggb8': (1, cv2.COLOR_BayerBG2RGB), 'bayer_bggr8': (1, cv2.COLOR_BayerRG2RGB),
    'bayer_gbrg8': (1, cv2.COLOR_BayerGR2RGB), 'bayer_grbg8': (1, cv2.COLOR_BayerGB2RGB),
}


def decode_image(message: Any, topic: str) -> np.ndarray:
    """Return uint8 [h, w, 3] RGB in memory of its own (the message may be reused at once).

    message: sensor_msgs Image or CompressedImage, from rclpy or rosbags. Raises ObservationError naming the topic.
    """
    if hasattr(message, 'format'):
        return _decode_compressed(message, topic)
    pixels = _pixels(message, topic)
    return convert(pixels, message.encoding)


def convert(pixels: np.ndarray, encoding: str) -> np.ndarray:
    """uint8 [h, w, bytes per pixel] in a known encoding -> uint8 [h, w, 3] RGB, a copy."""
    code = ENCODINGS[encoding][1]
    if code is None:
        return pixels.copy()
    channels = pixels if pixels.shape[2] > 1 else pixels[:, :, 0]
    return cv2.cvtColor(np.ascontiguousarray(channels), code)


def _pixels(message: Any, topic: str) -> np.ndarray:
    """View the message's bytes as [h, w, bytes per pixel], row padding left out."""
    encoding, height, width, step = message.encoding, message.height, message.width, message.step
    if encoding not in ENCODINGS:
        raise ObservationError(f'{topic}: encoding {encoding!r} is no 8-bit colour or grey image; publish one of '
                               f'{", ".join(ENCODINGS)}')
    depth = ENCODINGS[encoding][0]
    data = np.frombuffer(message.data, np.uint8)
    if not height or not width or step < width * depth or len(data) != step * height:
        raise ObservationError(f'{topic}: {len(data)} bytes do not make a {width}x{height} {encoding} image '
                               f'with step {step} (expected step >= {width * depth}, step * height bytes); check the '
                               'camera driver')
    if depth == 2 and width % 2:
        raise ObservationError(f'{topic}: width {width} of a {encoding} image is odd, but its pixels share colour '
                               'in pairs; choose another size or encoding in the camera driver')
    rows = data.reshape(height, step)[:, :width * depth]
    return rows.reshape(height, width, depth)


def _decode_compressed(message: Any, topic: str) -> np.ndarray:
    """JPEG or PNG. ``format`` is free text; only its channel order after "compressed" matters, and depth is refused."""
    if 'compressedDepth' in message.format:
        raise ObservationError(f'{topic}: format {message.format!r} is a depth image; the policy takes colour images')
    data = np.frombuffer(message.data, np.uint8)
    try:
        stored = cv2.imdecode(data, cv2.IMREAD_UNCHANGED) if len(data) else None
    except cv2.error:
        stored = None
    if stored is None:
        raise ObservationError(f'{topic}: {len(data)} bytes of format {message.format!r} are no readable JPEG or PNG '
                               'image; the frame is dropped')
    if stored.dtype != np.uint8:
        raise ObservationError(f'{topic}: format {message.format!r} holds {stored.dtype} pixels; the policy takes '
                               '8-bit images')
    if stored.ndim == 2:
        return cv2.cvtColor(stored, cv2.COLOR_GRAY2RGB)
    order = message.format.rpartition('compressed')[2].strip()
    # cv2.imdecode calls the first stored channel "red"; a publisher that compressed an RGB array unconverted swapped
    # it.
    swapped = order.startswith('rgb')
    if stored.shape[2] == 4:
        stored = stored[:, :, :3]
    return np.ascontiguousarray(stored if swapped else stored[:, :, ::-1])
