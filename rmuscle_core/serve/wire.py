# SPDX-License-Identifier: Apache-2.0
"""msgpack with numpy arrays, as openpi-client 0.1 writes and reads it.

An array is a map of the byte keys ``__ndarray__``, ``data``, ``dtype`` and ``shape``, a scalar one of
``__npgeneric__``, ``data`` and ``dtype``. Only plain numbers are accepted: no dtype here can hold objects, and nothing
is unpickled.
"""

from __future__ import annotations

import math
import re
from typing import Any

import msgpack
import numpy as np

from rmuscle_core.errors import ObservationError

MAX_BYTES = 64 * 2**20  # of one request; three raw full-HD pictures are 19 MB
_NUMBERS = re.compile(r'[<>|=]?(b1|[iu][1248]|f[248])')
# A few kilobytes must not become gigabytes of Python objects; arrays of numbers travel as one binary item.
_LIMITS = {'max_array_len': 4096, 'max_map_len': 256, 'max_str_len': 65536, 'max_ext_len': 0}


def pack(message: dict[str, Any]) -> bytes:
    """The message as one binary frame; values may be numpy arrays and scalars of numbers."""
    return msgpack.packb(message, default=_to_map)


def unpack(frame: bytes | str) -> dict[str, Any]:
    """Read one frame; its arrays share the frame's memory and cannot be written.

    Raises ObservationError for anything but a map of names to numbers, text, arrays of numbers and nested maps.
    """
    if isinstance(frame, str):
        raise ObservationError('the request is a text frame, expected a binary one with msgpack; use openpi-client or '
                               'see docs/serving.md')
    try:
        message = msgpack.unpackb(frame, object_hook=_from_map, strict_map_key=False, **_LIMITS)
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise ObservationError(f'the request is not msgpack as openpi-client writes it ({type(error).__name__}: '
                               f'{error}); see docs/serving.md') from error
    if not isinstance(message, dict):
        raise ObservationError(f'the request is {type(message).__name__}, expected a map of names to values')
    return message


def _to_map(value: Any) -> dict[bytes, Any]:
    if not isinstance(value, (np.ndarray, np.generic)) or not _NUMBERS.fullmatch(value.dtype.str):
        raise TypeError(f'{type(value).__name__} cannot be sent')
    if isinstance(value, np.generic):
        return {b'__npgeneric__': True, b'data': value.item(), b'dtype': value.dtype.str}
    return {b'__ndarray__': True, b'data': value.tobytes(), b'dtype': value.dtype.str, b'shape': value.shape}


def _from_map(value: dict[Any, Any]) -> Any:
    if b'__npgeneric__' in value:
        return value.get(b'data')
    if b'__ndarray__' not in value:
        return value
    data, dtype, shape = (value.get(key) for key in (b'data', b'dtype', b'shape'))
    if not isinstance(dtype, str) or not _NUMBERS.fullmatch(dtype):
        raise ValueError(f'array of dtype {str(dtype)[:40]!r}, expected integers, floats or booleans')
    if not isinstance(data, bytes) or not isinstance(shape, list) or len(shape) > 8 or \
            not all(isinstance(n, int) and n >= 0 for n in shape):
        raise ValueError(f'array without bytes or with shape {str(shape)[:40]}')
    kind = np.dtype(dtype)
    if math.prod(shape) * kind.itemsize != len(data):
        raise ValueError(f'array of {dtype} {shape} with {len(data)} bytes')
    return np.frombuffer(data, kind).reshape(shape)
