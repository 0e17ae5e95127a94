# SPDX-License-Identifier: Apache-2.0
"""Hostile messages of cameras and joints: whatever comes, it is used rightly or refused in one sentence.

Each target takes a random.Random and raises when that does not hold; equal seeds make equal messages.
"""

from __future__ import annotations

import array
import math
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np

from rmuscle_core.errors import ObservationError, RMuscleError
from rmuscle_core.sensing.compressed import stored_size
from rmuscle_core.sensing.image import PACKED, PLANAR, decode_image
from rmuscle_core.sensing.joints import JointMap
from rmuscle_core.sensing.observe import ObservationBuffer
from rmuscle_core.sensing.samples import LEAD_NS

JOINTS = ('j1', 'j2', 'gripper')
EDGES = (0, 1, 2, 3, 255, 2**15, 2**16 + 1, 2**31 - 1, 2**31, 2**32 - 1)
NUMBERS = (0.0, -0.0, 1e-320, 3.5e38, -1e308, math.nan, math.inf, -math.inf)
FORMATS = ('', 'jpeg', 'png', 'rgb8; jpeg compressed bgr8', 'bgr8; png compressed rgb8', 'mono8; jpeg compressed ',
           'bayer_rggb8; jpeg compressed ', '16UC1; compressedDepth png', ';;;', 'compressed' * 99, 'ä\n\0')
MAX_AGE_NS = 300_000_000


def targets() -> dict[str, Callable[[random.Random], None]]:
    """Name -> target."""
    return {'image': image, 'compressed': compressed, 'header': header, 'joints': joints, 'buffer': buffer}


def one_sentence(error: RMuscleError) -> None:
    """A refusal is short, on one line, and says something."""
    text = str(error)
    assert 20 < len(text) < 500 and '\n' not in text and not text.endswith('.') and 'Traceback' not in text, repr(text)


def refused(message: Any) -> bool:
    """Decode; whether it was refused. Anything but a picture or a refusal raises."""
    try:
        picture = decode_image(message, '/cam')
    except ObservationError as error:
        one_sentence(error)
        assert str(error).startswith('/cam: '), str(error)
        return True
    assert picture.dtype == np.uint8 and picture.ndim == 3 and picture.shape[2] == 3 and picture.size, picture.shape
    assert picture.flags.writeable and not np.shares_memory(picture, np.frombuffer(message.data, np.uint8))
    return False


def held(rng: random.Random, data: bytes) -> Any:
    """The bytes in one of the types that message classes hold them in."""
    return rng.choice((lambda: data, lambda: bytearray(data), lambda: array.array('B', data),
                       lambda: np.frombuffer(data, np.uint8)))()


def valid_image(rng: random.Random) -> SimpleNamespace:
    """An Image that keeps what it says."""
    encoding = rng.choice([*PACKED, *PLANAR])
    depth = PACKED[encoding][0] if encoding in PACKED else 1
    height, width = (2 * rng.randint(2, 12) for _ in range(2))
    step = width * depth + rng.choice((0, 0, 1, 12))
    rows = height * 3 // 2 if encoding in PLANAR else height
    return SimpleNamespace(header=stamped(0), encoding=encoding, height=height, width=width, step=step,
                           is_bigendian=rng.randint(0, 1), data=held(rng, rng.randbytes(rows * step)))


def image(rng: random.Random) -> None:
    """Raw images: valid ones are decoded, to the size they say; others may have any field wrong."""
    message = valid_image(rng)
    assert not refused(message) and decode_image(message, '/cam').shape == (message.height, message.width, 3)
    for _ in range(rng.randint(1, 3)):
        name = rng.choice(('encoding', 'height', 'width', 'step', 'data'))
        if name == 'encoding':
            message.encoding = rng.choice([*PACKED, *PLANAR, '', '16UC1', '32FC1', '8UC3', 'RGB8', 'x' * 2000, 'a\nb'])
        elif name == 'data':
            size = len(message.data)
            message.data = held(rng, rng.randbytes(rng.choice((0, 1, max(0, size - 1), size, size + 1, 999))))
        else:
            setattr(message, name, rng.choice((*EDGES, max(0, getattr(message, name) + rng.randint(-2, 2)))))
    refused(message)


def packed(rng: random.Random) -> bytes:
    """A small JPEG or PNG: colour, grey, with alpha, or 16 bits deep."""
    shape = (rng.randint(1, 20), rng.randint(1, 20), *rng.choice(((), (3,), (3,), (4,))))
    pixels = np.frombuffer(rng.randbytes(int(np.prod(shape))), np.uint8).reshape(shape)
    codec = rng.choice(('.jpg', '.png'))
    if codec == '.png' and rng.random() < 0.2:
        pixels = pixels.astype(np.uint16) * 257
    return cv2.imencode(codec, pixels[..., :3] if codec == '.jpg' and len(shape) == 3 else pixels)[1].tobytes()


def damaged(rng: random.Random, data: bytes) -> bytes:
    """Cut, overwritten, spliced, repeated or replaced."""
    at, to = sorted(rng.randint(0, len(data)) for _ in range(2))
    return rng.choice((
        lambda: data[:at], lambda: data[at:], lambda: data[:at] + data[to:], lambda: data + data,
        lambda: data[:at] + rng.randbytes(rng.randint(1, 8)) + data[at:],
        lambda: data[:at] + bytes([rng.choice((0, 0x7F, 0xFF))]) * min(4, to - at) + data[min(at + 4, to):],
        lambda: rng.randbytes(to - at)))()


def compressed(rng: random.Random) -> None:
    """JPEG and PNG: one that is cut off is never taken for a picture."""
    data, text = packed(rng), rng.choice(FORMATS)
    cut = data[:rng.randrange(len(data) - 1)]
    assert stored_size(cut) is None, f'{len(cut)} of {len(data)} bytes were taken for all'
    assert refused(SimpleNamespace(format=text, data=held(rng, cut)))
    for _ in range(rng.randint(0, 3)):
        data = damaged(rng, data)
    refused(SimpleNamespace(format=text, data=held(rng, data)))


def header(rng: random.Random) -> None:
    """The size in a header, from bytes of any kind."""
    size = stored_size(damaged(rng, packed(rng)))
    assert size is None or (len(size) == 2 and min(size) >= 0)


def stamped(stamp_ns: int) -> SimpleNamespace:
    sec, nanosec = divmod(stamp_ns, 1_000_000_000)
    return SimpleNamespace(stamp=SimpleNamespace(sec=sec, nanosec=nanosec))


def joint_message(rng: random.Random, stamp_ns: int) -> SimpleNamespace:
    """A JointState of some joints, ours and others, mostly consistent."""
    names = [rng.choice((*JOINTS, 'wheel', '', 'j' * 500)) for _ in range(rng.randint(0, 5))]
    if rng.random() < 0.7:
        names = list(dict.fromkeys(names))
    count = len(names) if rng.random() < 0.8 else rng.randint(0, 6)
    values = [rng.choice((*NUMBERS, rng.uniform(-3, 3), rng.uniform(-3, 3))) for _ in range(count)]
    return SimpleNamespace(header=stamped(stamp_ns), name=names,
                           position=rng.choice((list, np.array))(values), velocity=[], effort=[])


def joints(rng: random.Random) -> None:
    """Joint states of several publishers: each joint holds its last finite position, whatever else was sent."""
    observed, known = ObservationBuffer(JointMap.build(JOINTS), {}, 60.0), {}
    for time_ns in range(1, rng.randint(2, 12)):
        message = joint_message(rng, time_ns)
        try:
            observed.add_joint_state(message, time_ns)
        except ObservationError as error:
            one_sentence(error)
        else:
            known.update((n, p) for n, p in zip(message.name, message.position) if n in JOINTS and math.isfinite(p))
        measured = observed.measured(time_ns)
        assert (measured is None) == (len(known) < len(JOINTS))
        assert measured is None or measured.tolist() == [known[name] for name in JOINTS]


def buffer(rng: random.Random) -> None:
    """Any order of messages, clears and clock jumps: an observation is complete, finite and fresh, or there is none."""
    observed = ObservationBuffer(JointMap.build(JOINTS), {'base': '/cam', 'wrist': '/c1'}, MAX_AGE_NS / 1e9,
                                 rng.choice((0.0, 0.1)))
    now_ns = 10_000_000_000
    for _ in range(rng.randint(5, 40)):
        now_ns = max(1, now_ns + rng.choice((0, 1, 10**7, 10**8, -10**8, 5 * 10**9, -5 * 10**9)))
        stamp_ns = max(0, now_ns + rng.choice((0, 0, 0, -10**7, -10**9, 10**7, 10**9, -now_ns)))
        step = rng.choice(('image', 'image', 'broken', 'joints', 'all', 'clear'))
        if step == 'clear':
            observed.clear()
        for camera in {'image': ('base',), 'broken': ('wrist',), 'all': ('base', 'wrist')}.get(step, ()):
            message = valid_image(rng)
            message.header = stamped(stamp_ns)
            message.step += step == 'broken'
            observed.add_image(camera, message, now_ns)
        if step in ('joints', 'all'):
            message = joint_message(rng, stamp_ns) if step == 'joints' else SimpleNamespace(
                header=stamped(stamp_ns), name=JOINTS, position=[0.5] * len(JOINTS))
            try:
                observed.add_joint_state(message, now_ns)
            except ObservationError as error:
                one_sentence(error)
        check_taken(observed, now_ns)


def check_taken(observed: ObservationBuffer, now_ns: int) -> None:
    """Take an observation and compare it with what the buffer says of itself."""
    problem, ages = observed.problem(now_ns), [observed.ages_s(source, now_ns) for source in ('base', 'wrist', None)]
    try:
        snapshot = observed.take('lift', now_ns)
    except ObservationError as error:
        one_sentence(error)
        return
    assert (snapshot is None) == bool(problem), problem
    if snapshot is not None:
        assert sorted(snapshot.observation.images) == ['base', 'wrist']
        assert np.isfinite(snapshot.measured).all() and snapshot.observation.state.shape == (len(JOINTS),)
        assert all(-LEAD_NS <= 1e9 * by_stamp <= MAX_AGE_NS + 1 and 1e9 * by_arrival <= MAX_AGE_NS + 1
                   for by_stamp, by_arrival in ages), ages
