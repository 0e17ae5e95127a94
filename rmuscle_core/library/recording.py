# SPDX-License-Identifier: Apache-2.0
"""Raw recordings (HDF5): what the robot saw at each policy call, from which a library is built.

Format in docs/library-format.md. Pictures are compressed without loss; nothing in it depends on a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from rmuscle_core.errors import EpisodeError, reason
from rmuscle_core.library.durable import appearing
from rmuscle_core.library.hdf5_file import writing
from rmuscle_core.observation import Observation

FORMAT, VERSION = 'rmuscle-recording', 1


@dataclass(frozen=True)
class RecordedEpisode:
    """One execution: an observation per policy call, in order."""

    name: str
    success: bool
    observations: Sequence[Observation]


@dataclass(frozen=True)
class Label:
    """What is told of an episode without reading its pictures; prompt and cameras of its first call, if it has one."""

    name: str
    prompt: str
    cameras: tuple[str, ...]


def write_recording(path: str | Path, episodes: Iterable[RecordedEpisode], joints: Sequence[str] = ()) -> None:
    """Write the episodes to one file, which appears when it is complete. joints: names in the order of the state."""
    with appearing(Path(path)) as temporary, writing(temporary) as file:
        file.attrs['format'], file.attrs['version'] = FORMAT, VERSION
        file.attrs['joints'] = list(joints) or h5py.Empty('S1')
        for number, episode in enumerate(episodes):
            group = file.create_group(f'episodes/{number:05d}')
            group.attrs['name'], group.attrs['success'] = episode.name, bool(episode.success)
            for call, observation in enumerate(episode.observations):
                _write_call(group.create_group(f'calls/{call:05d}'), observation)
                file.check()


def _write_call(group: h5py.Group, observation: Observation) -> None:
    group.attrs['prompt'], group.attrs['stamp_s'] = observation.prompt, float(observation.stamp_s)
    group.create_dataset('state', data=np.asarray(observation.state, np.float32))
    for camera, picture in observation.images.items():
        group.create_dataset(f'images/{camera}', data=picture, chunks=picture.shape, compression='gzip',
                             compression_opts=4)


def open_recording(path: str | Path) -> Recording:
    """Open a recording for reading, as a context; raises EpisodeError naming the file when it cannot be used."""
    with _reading(path):
        file = h5py.File(path, 'r', locking=False)
        found = file.attrs.get('format'), file.attrs.get('version')
        if found != (FORMAT, VERSION):
            file.close()
            other = f'{found[0]} version {found[1]}' if found[0] else 'another HDF5 file'
            raise ValueError(f'expected {FORMAT} version {VERSION}, found {other}')
        return Recording(path, file)


class Recording:
    """An open recording; ``len`` counts its episodes, iteration reads one at a time and may raise EpisodeError.

    keys: of its episodes, in order, for ``read`` and ``label``, which raise it too.
    """

    def __init__(self, path: str | Path, file: h5py.File) -> None:
        joints = file.attrs['joints']
        self.joints = () if isinstance(joints, h5py.Empty) else tuple(joints)
        self._path, self._file, self._episodes = path, file, file.get('episodes', {})
        self.keys = sorted(self._episodes)

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[RecordedEpisode]:
        return map(self.read, self.keys)

    def read(self, key: str) -> RecordedEpisode:
        with _reading(self._path):
            group = self._episodes[key]
            calls = group.get('calls', {})
            observations = [_read_call(calls[call]) for call in sorted(calls)]
            return RecordedEpisode(str(group.attrs['name']), bool(group.attrs['success']), observations)

    def label(self, key: str) -> Label:
        with _reading(self._path):
            group = self._episodes[key]
            calls = group.get('calls', {})
            if not calls:
                return Label(str(group.attrs['name']), '', ())
            first = calls[min(calls)]
            return Label(str(group.attrs['name']), str(first.attrs['prompt']), tuple(first.get('images', {})))


def _read_call(group: h5py.Group) -> Observation:
    images = {camera: picture[()] for camera, picture in group.get('images', {}).items()}
    return Observation(images, group['state'][()], str(group.attrs['prompt']), float(group.attrs['stamp_s']))


@contextmanager
def _reading(path: str | Path) -> Iterator[None]:
    try:
        yield
    except (OSError, KeyError, RuntimeError, ValueError) as error:
        raise EpisodeError(f'recording {path} is unusable ({reason(error)}); correct the path or record it again'
                           ) from error
