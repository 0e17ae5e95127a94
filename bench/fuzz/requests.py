# SPDX-License-Identifier: Apache-2.0
"""Frames that a client sends to ``rmuscle serve``: each becomes an observation or is refused."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np

from rmuscle_core.errors import ObservationError
from rmuscle_core.serve.request import RequestMap
from rmuscle_core.serve.wire import pack, unpack

CAMERAS = ('base_0_rgb', 'top')
VALUES = (None, True, -1, 2**63, 1.5, float('nan'), '', 'x' * 70000, b'', b'\xff' * 9, [], [1, 'a'], [[1.0], [2.0]],
          {}, {'a': {'b': {'c': {'d': {'e': 1}}}}}, {1: 2}, {b'__ndarray__': True}, {b'__npgeneric__': True},
          {b'__ndarray__': True, b'data': b'12', b'dtype': '|O', b'shape': [2]},
          {b'__ndarray__': True, b'data': b'', b'dtype': '<f8', b'shape': [0, 2**40]},
          {b'__ndarray__': True, b'data': b'1234', b'dtype': '<f4', b'shape': [True]}, ['top'] * 5000)


def targets() -> dict[str, Callable[[random.Random], None]]:
    """Name -> target."""
    return {'requests: values': values, 'requests: bytes': frame_bytes}


def valid(rng: random.Random) -> dict[str, Any]:
    """A request of one of openpi's robots."""
    picture = np.full((4, 6, 3), rng.randrange(256), np.uint8)
    return {rng.choice(('observation/image', 'images/cam_high')): picture, 'observation/images/top': picture,
            'observation/state': np.zeros(7, rng.choice((np.float32, np.float64))), 'prompt': 'lift'}


@functools.lru_cache(maxsize=1)
def names() -> RequestMap:
    return RequestMap.build(CAMERAS)


def read(frame: bytes) -> None:
    """Raises what is neither an observation nor a refusal."""
    try:
        observation = names().observation(unpack(frame))
    except ObservationError:
        return
    assert set(observation.images) == set(CAMERAS) and observation.prompt.strip()
    assert observation.state.dtype == np.float32, observation.state.dtype  # its shape is the processor's to check
    assert all(p.dtype == np.uint8 and p.ndim == 3 and p.shape[2] == 3 for p in observation.images.values())


def values(rng: random.Random) -> None:
    """Any value in any place, as another client may pack it."""
    request = valid(rng)
    read(pack(request))
    for _ in range(rng.randint(1, 3)):
        name = rng.choice((*request, 'state', 'task', 'images', 5, b'x'))
        request[name] = rng.choice((
            lambda: rng.choice(VALUES),
            lambda: np.zeros(rng.choice(((), (0,), (2, 2), (3, 4, 4), (1, 1, 1, 1), (4, 4, 4))),
                             rng.choice((np.uint8, np.float64, np.int64, bool)))))()
    try:
        frame = pack(request)
    except (TypeError, ValueError, OverflowError):
        frame = msgpack.packb({'prompt': 'lift', 'state': rng.choice(VALUES[:13])})
    read(frame)


def frame_bytes(rng: random.Random) -> None:
    """Bytes changed, cut off, repeated."""
    data = bytearray(pack(valid(rng)))
    for _ in range(rng.randint(1, 5)):
        at = rng.randrange(len(data) or 1)
        end, instead = rng.choice(((None, b''), (at + 1, rng.randbytes(1)), (at + 3, b''), (at, data[at:at + 40])))
        data[at:end] = instead
    read(bytes(data))
