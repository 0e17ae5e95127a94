# SPDX-License-Identifier: Apache-2.0
"""JPEG and PNG pictures of sensor_msgs/CompressedImage, judged by their header before anything is unpacked."""

from __future__ import annotations

import struct

import cv2
import numpy as np

from rmuscle_core.errors import ObservationError

MAX_PIXELS = 50_000_000  # a few hundred bytes can ask for gigabytes; no camera that feeds a policy is larger
PNG, JPEG = b'\x89PNG\r\n\x1a\n', b'\xff\xd8\xff'
PNG_END = b'IEND\xaeB`\x82'  # with its checksum, which is always this
STANDALONE = {0x01, *range(0xD0, 0xD8)}  # JPEG markers without a length
FRAME = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # JPEG markers that give the size


def decode_compressed(data: np.ndarray, text: str, topic: str) -> np.ndarray:
    """uint8 [bytes] -> uint8 [h, w, 3] RGB, alpha dropped, grey in all three, never rotated by what EXIF says.

    ``text`` is the message's free-text format, in which only two things count: a channel order after "compressed",
    and a raw mosaic or a depth image before it. Raises ObservationError naming the topic.
    """
    said = text[:40]
    if 'compressedDepth' in text:
        raise ObservationError(f'{topic}: format {said!r} is a depth image; the policy takes colour images')
    size = stored_size(data.tobytes())
    if size is None:
        raise ObservationError(f'{topic}: {len(data)} bytes of format {said!r} are no readable JPEG or PNG image; the '
                               'frame is dropped')
    if size[0] * size[1] > MAX_PIXELS:
        raise ObservationError(f'{topic}: the picture says to be {size[0]}x{size[1]}, more than {MAX_PIXELS} pixels; '
                               'choose a smaller size in the camera driver')
    try:
        stored = cv2.imdecode(data, cv2.IMREAD_UNCHANGED)  # the one flag that leaves the orientation alone
    except cv2.error:
        stored = None
    if stored is None:
        raise ObservationError(f'{topic}: {len(data)} bytes of format {said!r} are no readable JPEG or PNG image; the '
                               'frame is dropped')
    if stored.dtype != np.uint8:
        raise ObservationError(f'{topic}: format {said!r} holds {stored.dtype} pixels; the policy takes 8-bit images')
    return _to_rgb(stored, text, topic)


def _to_rgb(stored: np.ndarray, text: str, topic: str) -> np.ndarray:
    if stored.ndim == 2:
        if text.startswith('bayer'):
            raise ObservationError(f'{topic}: format {text[:40]!r} is a raw Bayer mosaic, not a picture; subscribe to '
                                   'the compressed topic of the debayered image')
        return cv2.cvtColor(stored, cv2.COLOR_GRAY2RGB)
    # cv2.imdecode calls the first stored channel "red"; a publisher that compressed an RGB array unconverted swapped
    # it.
    swapped = text.rpartition('compressed')[2].strip().startswith('rgb')
    colours = stored[:, :, :3]
    return np.ascontiguousarray(colours if swapped else colours[:, :, ::-1])


def stored_size(data: bytes) -> tuple[int, int] | None:
    """(width, height) from the header of a JPEG or PNG that is there to its end; None for anything else.

    Decoders differ in what they make of a picture cut off in transit; some return it with a grey rest.
    """
    if data.startswith(PNG):
        whole = len(data) >= 24 and PNG_END in data
        return struct.unpack('>II', data[16:24]) if whole else None
    whole = data.startswith(JPEG) and data.rfind(b'\xff\xd9') > data.rfind(b'\xff\xda')
    return _jpeg_size(data) if whole else None


def _jpeg_size(data: bytes) -> tuple[int, int] | None:
    at = 2
    while at + 9 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker in FRAME:
            height, width = struct.unpack('>HH', data[at + 5:at + 9])
            return width, height
        if marker == 0xFF:
            at += 1  # fill byte
        else:
            at += 2 if marker in STANDALONE else 2 + int.from_bytes(data[at + 2:at + 4], 'big')
    return None
