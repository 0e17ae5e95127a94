# SPDX-License-Identifier: Apache-2.0
"""Damaged and hostile library files: each is refused in one sentence, or what is read is what was written.

``targets()`` returns name -> ``callable(rng, folder)``, which makes one input in an empty folder, tries it, and raises
AssertionError (or whatever escaped) when the library did anything but refuse it or read it right.
"""

from __future__ import annotations

import copy
import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import torch

from rmuscle_core.errors import EpisodeError, LibraryError
from rmuscle_core.library import EpisodeLibrary, Reference, ReferenceId
from rmuscle_core.library.index import CACHE
from rmuscle_core.library.recording import RecordedEpisode, open_recording, write_recording
from rmuscle_core.observation import Observation

FINGERPRINT = {'weights': 'w1', 'images': '64x64'}
HOSTILE = (None, True, -1, 0, 1 << 63, 1e308, '', 'x' * 5000, '../../etc/passwd', 'naïve name', '\0', [], {}, [[]],
           {'a': {}}, [1 << 40, 1 << 40], [-1, 2], ['top'] * 500, '<f8', '|O', '|S0')
ARRAYS = {'prefix': ((32, 24), np.uint16), 'token_ids': ((11,), np.int32), 'states': ((2, 5), np.float32),
          'key': ((2, 24), np.float32), 'neurons': ((2, 3, 40), np.uint16), 'chunk': ((6, 5), np.float32)}


def targets() -> dict[str, Callable[[random.Random, Path], None]]:
    return {'library: episode bytes': episode_bytes, 'library: episode header': episode_header,
            'library: episode datasets': episode_datasets, 'library: library.json': library_json,
            'library: index': index_bytes, 'library: names': names, 'library: recording bytes': recording_bytes}


def episode_bytes(rng: random.Random, folder: Path) -> None:
    """Bytes changed, cut off, repeated or swapped anywhere in an episode file."""
    path = _library(folder)
    path.write_bytes(mutate(rng, path.read_bytes()))
    _try(folder)


def episode_header(rng: random.Random, folder: Path) -> None:
    """A header that says something else, with a checksum that agrees."""
    path = _library(folder)
    with h5py.File(path, 'r+') as file:
        header = json.loads(file['header'][()])
        for _ in range(rng.randint(1, 3)):
            replace_somewhere(rng, header)
        _write_header(file, header)
    _try(folder)


def episode_datasets(rng: random.Random, folder: Path) -> None:
    """A dataset of another type, shape, layout or place than the header says, or than it should say."""
    path = _library(folder)
    name = rng.choice(list(ARRAYS))
    with h5py.File(path, 'r+') as file:
        group = file['calls/00001']
        del group[name]
        rng.choice((_other_array, _link, _virtual, _external, _compressed))(rng, folder, group, name)
        if rng.random() < 0.5 and isinstance(group.get(name, getlink=True), h5py.HardLink):
            header = json.loads(file['header'][()])
            header['calls'][1]['datasets'][name] = {
                'dtype': group[name].dtype.str, 'shape': list(group[name].shape), 'blake2b': '0' * 32}
            _write_header(file, header)
    _try(folder)


def library_json(rng: random.Random, folder: Path) -> None:
    """A library.json of other content or other bytes."""
    _library(folder)
    path = folder / 'library' / 'library.json'
    content = json.loads(path.read_text())
    replace_somewhere(rng, content)
    text = json.dumps(content).encode()
    path.write_bytes(mutate(rng, text) if rng.random() < 0.5 else text)
    _try(folder)


def index_bytes(rng: random.Random, folder: Path) -> None:
    """A damaged index, or one of another library, is made again and changes nothing."""
    _library(folder)
    path = folder / 'library' / CACHE
    library = EpisodeLibrary.open(folder / 'library')
    from rmuscle_core.library.index import write_cache
    write_cache(library.path, library.episodes, FINGERPRINT)
    path.write_bytes(mutate(rng, path.read_bytes()))
    opened = EpisodeLibrary.open(folder / 'library', FINGERPRINT)
    assert opened.problems == [] and len(opened.index().ids) == 4
    assert np.array_equal(opened.index().keys, library.index().keys)


def names(rng: random.Random, folder: Path) -> None:
    """Files and folders whose names no episode has."""
    path = _library(folder)
    letters = ' ./\\:*?"<>|ümlaut\u202e\n\t' + 'ab.h5'
    name = ''.join(rng.choice(letters) for _ in range(rng.randint(1, 20))).replace('/', '_') + '.h5'
    path.rename(path.with_name(name))
    library = EpisodeLibrary.open(folder / 'library', FINGERPRINT)
    assert [e.episode for e in library.episodes] == ['two'], library.episodes
    for problem in library.problems:
        _one_sentence(problem)
    for task, episode in ((f' {name}', 'a'), ('a', f'{name}/'), ('../up', 'a'), ('a', 'b/c'), ('a' * 200, 'b')):
        _refused(lambda task=task, episode=episode: library.add_episode(task, _references(), True, episode))


def recording_bytes(rng: random.Random, folder: Path) -> None:
    """A damaged recording of raw observations."""
    path = folder / 'recording.h5'
    picture = np.full((4, 6, 3), 7, np.uint8)
    write_recording(path, [RecordedEpisode('one', True, [Observation({'top': picture}, np.ones(3, np.float32), 'go')])])
    path.write_bytes(mutate(rng, path.read_bytes()))

    def read() -> None:
        with open_recording(path) as recording:
            list(recording)
    _refused(read, must=False)


def mutate(rng: random.Random, content: bytes) -> bytes:
    """Change some bytes, cut off the end, drop, repeat or overwrite a part."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        # the structures of HDF5 lie mostly at the beginning
        place = rng.randrange(min(len(data), rng.choice((64, 2048, len(data))))) if data else 0
        length = rng.choice((1, 2, 8, 200))
        way = rng.randrange(5)
        if way == 0:
            del data[place:]
        elif way == 1:
            del data[place:place + length]
        elif way == 2:
            data[place:place] = data[place:place + length]
        elif way == 3:
            data[place:place + length] = bytes([rng.choice((0, 255))]) * len(data[place:place + length])
        elif data:
            data[place] ^= rng.randint(1, 255)
    return bytes(data)


def replace_somewhere(rng: random.Random, content: dict | list) -> None:
    """Put a hostile value somewhere into nested dicts and lists, or take something away."""
    keys = list(content) if isinstance(content, dict) else list(range(len(content)))
    if not keys:
        return
    key = rng.choice(keys)
    if isinstance(content[key], (dict, list)) and rng.random() < 0.8:
        replace_somewhere(rng, content[key])
    elif rng.random() < 0.2:
        del content[key]
    else:
        content[key] = copy.deepcopy(rng.choice(HOSTILE))  # the next replacement may change it


def _references() -> list[Reference]:
    values = np.random.default_rng(0)

    def array(name: str) -> np.ndarray:
        shape, dtype = ARRAYS[name]
        return values.integers(0, 60, shape).astype(dtype) if np.dtype(dtype).kind != 'f' else (
            values.normal(size=shape).astype(dtype))
    return [Reference(ReferenceId('stack', 'one', call), torch.ones(32, 24, dtype=torch.bfloat16) * call,
                      array('token_ids'), array('states'), array('key'), array('neurons'), array('chunk'),
                      ('top', 'wrist')) for call in range(2)]


def _library(folder: Path) -> Path:
    """Two episodes; returns the one that is to be damaged."""
    library = EpisodeLibrary.create(folder / 'library', FINGERPRINT)
    library.add_episode('stack', _references(), True, 'two')
    return library.add_episode('stack', _references(), True, 'one')


def _try(folder: Path) -> None:
    """Open and read all: refusals in one sentence, the undamaged episode usable, nothing read that was not written."""
    try:
        library = EpisodeLibrary.open(folder / 'library', FINGERPRINT)
    except LibraryError as error:
        _one_sentence(error)
        return
    expected = _references()
    for reference in library.index().ids:
        try:
            read = library.load(reference)
        except EpisodeError as error:
            _one_sentence(error)
            assert reference.episode == 'one', error
        else:
            assert reference.episode == 'one' or np.array_equal(read.key, expected[reference.call].key)
    for problem in library.problems:
        _one_sentence(problem)
    assert 'two' in {episode.episode for episode in library.episodes}, library.problems


def _refused(action: Callable[[], object], must: bool = True) -> None:
    try:
        action()
    except LibraryError as error:
        _one_sentence(error)
    else:
        assert not must, 'it was not refused'


def _one_sentence(error: object) -> None:
    text = str(error)
    assert text.strip() and '\n' not in text and len(text) < 2000, text


def _write_header(file: h5py.File, header: object) -> None:
    text = json.dumps(header).encode()
    del file['header']
    file['header'] = np.bytes_(text)
    file.attrs['header_blake2b'] = hashlib.blake2b(text, digest_size=16).hexdigest()


def _other_array(rng: random.Random, folder: Path, group: h5py.Group, name: str) -> None:
    shape = rng.choice(((), (0,), (1 << 40,), (1 << 20, 1 << 20), (2, 3, 40), (1, 1), (2, 24)))
    kind = rng.choice(('<f4', '<f8', '>i4', '<u2', 'S5', h5py.string_dtype(), h5py.ref_dtype, bool))
    group.create_dataset(name, shape=shape, dtype=kind)


def _link(rng: random.Random, folder: Path, group: h5py.Group, name: str) -> None:
    group[name] = rng.choice((h5py.SoftLink('/header'), h5py.SoftLink('/calls/00001'), h5py.SoftLink('nowhere'),
                              h5py.ExternalLink(str(folder / 'library/stack/two.h5'), f'/calls/00001/{name}'),
                              h5py.ExternalLink('/etc/passwd', '/')))


def _virtual(rng: random.Random, folder: Path, group: h5py.Group, name: str) -> None:
    shape, dtype = ARRAYS[name]
    layout = h5py.VirtualLayout(shape, dtype)
    layout[...] = h5py.VirtualSource(str(folder / 'library/stack/two.h5'), f'/calls/00001/{name}', shape, dtype)
    group.create_virtual_dataset(name, layout)


def _external(rng: random.Random, folder: Path, group: h5py.Group, name: str) -> None:
    shape, dtype = ARRAYS[name]
    group.create_dataset(name, shape=shape, dtype=dtype, external=[('/etc/passwd', 0, h5py.h5f.UNLIMITED)])


def _compressed(rng: random.Random, folder: Path, group: h5py.Group, name: str) -> None:
    shape = rng.choice((ARRAYS[name][0], (4096, 4096)))
    group.create_dataset(name, data=np.zeros(shape, ARRAYS[name][1]), chunks=shape, compression='gzip')
