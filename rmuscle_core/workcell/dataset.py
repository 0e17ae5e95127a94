# SPDX-License-Identifier: Apache-2.0
"""The demonstration file: one npz, images packed without loss to about 2 kB per three 64-pixel views.

Needs numpy only, so that training runs on a machine without the simulator.
"""

from __future__ import annotations

import lzma
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np

from rmuscle_core import npz
from rmuscle_core.errors import RMuscleError, reason

_BLOCK = 512  # frames packed together; blocks are packed and unpacked in parallel
_IMAGES = ('images', 'located_images')


@dataclass(frozen=True)
class Demonstrations:
    """Successful episodes, and still frames that only show where things are.

    F frames of E episodes, V cameras of S pixels, N control steps of a plan, Q still frames, D landmark coordinates.
    """

    cameras: np.ndarray  # str [V]
    joints: np.ndarray  # str [A]
    control_rate: np.ndarray  # Hz, scalar
    task: np.ndarray  # str, scalar
    images: np.ndarray  # uint8 [F, V, S, S, 3]
    states: np.ndarray  # float32 [F, A]
    landmarks: np.ndarray  # float32 [F, D], metres: what the policy has to see, at the frame
    episodes: np.ndarray  # int32 [F]
    steps: np.ndarray  # int32 [F]: commands[episode, step] is the first command given after the frame
    commands: np.ndarray  # float32 [E, N, A], as planned: without the disturbance added while recording
    located_images: np.ndarray  # uint8 [Q, V, S, S, 3]
    located_states: np.ndarray  # float32 [Q, A]
    located_landmarks: np.ndarray  # float32 [Q, D]

    def seen_by(self, cameras: Sequence[str]) -> Demonstrations:
        """Only the views of ``cameras``, in that order; RMuscleError when one was not recorded."""
        recorded = self.cameras.tolist()
        for camera in cameras:
            if camera not in recorded:
                raise RMuscleError(f'the demonstrations have no camera {camera!r}; recorded are {", ".join(recorded)}')
        views = [recorded.index(camera) for camera in cameras]
        return replace(self, cameras=self.cameras[views], images=self.images[:, views],
                       located_images=self.located_images[:, views])

    def chunks(self, length: int) -> np.ndarray:
        """Commands that follow each frame, float32 [F, length, A]; a plan's last command is held."""
        rows = np.minimum(self.steps[:, None] + np.arange(length), self.commands.shape[1] - 1)
        return self.commands[self.episodes[:, None], rows]


def write(path: str | Path, demonstrations: Demonstrations) -> int:
    """Write the file in one move; return its size in bytes."""
    arrays = {field.name: getattr(demonstrations, field.name) for field in fields(Demonstrations)}
    for name in _IMAGES:
        stream, ends = _pack(arrays[name])
        arrays |= {name: stream, f'{name}_ends': ends, f'{name}_shape': np.array(arrays[name].shape)}
    partial = Path(f'{path}.part')
    with partial.open('wb') as file:
        np.savez(file, **arrays)
    os.replace(partial, path)
    return Path(path).stat().st_size


def read(path: str | Path) -> Demonstrations:
    """Read and unpack a demonstration file; RMuscleError when it is missing, damaged or something else."""
    try:
        with npz.opened(path) as file:
            old = 'cubes' in file  # a file of before there was a second task: cubes are [x, y, z]
            arrays = {field.name: file[field.name.replace('landmarks', 'cubes')][..., :2]
                      if old and 'landmarks' in field.name else file[field.name] for field in fields(Demonstrations)}
            for name in _IMAGES:
                arrays[name] = _unpack(arrays[name], file[f'{name}_ends'], file[f'{name}_shape'])
    except (*npz.FAULTS, lzma.LZMAError) as error:
        raise RMuscleError(f'{path} is not a readable demonstration file ({reason(error)}); '
                           'make one with "rmuscle workcell demos"') from error
    return Demonstrations(**arrays)


def join(parts: Sequence[Demonstrations]) -> Demonstrations:
    """Recordings of one cell as one; RMuscleError when they are of different cells."""
    first, firsts = parts[0], np.cumsum([0, *(len(part.commands) for part in parts)])
    for part in parts[1:]:
        for name in ('cameras', 'joints', 'control_rate', 'task'):
            own, other = getattr(first, name).tolist(), getattr(part, name).tolist()
            if own != other:
                raise RMuscleError(f'recordings cannot be joined: {name} is {own!r} in the first file, {other!r} in '
                                   'another; train on one task')
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in (
        'images', 'states', 'landmarks', 'steps', 'commands', 'located_images', 'located_states', 'located_landmarks')}
    episodes = np.concatenate([part.episodes + start for part, start in zip(parts, firsts)]).astype(np.int32)
    return replace(first, episodes=episodes, **columns)


def _pack(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        blocks = list(pool.map(_pack_block, np.array_split(images, max(1, len(images) // _BLOCK))))
    return np.frombuffer(b''.join(blocks), np.uint8), np.cumsum([len(block) for block in blocks])


def _pack_block(images: np.ndarray) -> bytes:
    # Neighbours in time are each other's best dictionary, so one camera after the other; grey surfaces become
    # (0, g, 0) by taking green off red and blue, modulo 256.
    views = np.ascontiguousarray(images.swapaxes(0, 1))
    views[..., ::2] -= views[..., 1:2]
    return lzma.compress(views.tobytes(), preset=6)


def _unpack(stream: np.ndarray, ends: np.ndarray, shape: np.ndarray) -> np.ndarray:
    blocks = np.split(stream, ends[:-1])
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        images = np.concatenate(list(pool.map(lambda block: _unpack_block(block, shape), blocks)))
    return images.reshape(shape)


def _unpack_block(block: np.ndarray, shape: np.ndarray) -> np.ndarray:
    _, cameras, height, width, channels = shape
    views = np.frombuffer(bytearray(lzma.decompress(block)), np.uint8).reshape(cameras, -1, height, width, channels)
    views[..., ::2] += views[..., 1:2]
    return views.swapaxes(0, 1)
