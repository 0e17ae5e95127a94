# SPDX-License-Identifier: Apache-2.0
"""A large library opens from its index, which never stands in for a file that changed."""

import os

import numpy as np
import pytest

from rmuscle_core.library import EpisodeLibrary, index
from rmuscle_core.library.episode import write_episode


@pytest.fixture
def library(tmp_path, shelf):
    """30 episodes, opened once."""
    library = EpisodeLibrary.create(tmp_path / 'library', shelf.fingerprint)
    (library.path / 'stack').mkdir()
    for number in range(30):
        views = ('top', 'wrist')[:1 + number % 2]
        write_episode(library.path / f'stack/e{number:02d}.h5', 'stack', number % 10 != 0, shelf.fingerprint,
                      shelf.references(3, seed=number, views=views))
    return EpisodeLibrary.open(library.path, shelf.fingerprint)


@pytest.fixture
def read_files(monkeypatch):
    """Names of the files that were read since."""
    read, real = [], index.read_header
    monkeypatch.setattr(index, 'read_header', lambda path: (read.append(path.stem), real(path))[1])
    return read


def equal(one, other):
    return (one.ids, one.views) == (other.ids, other.views) and np.array_equal(one.keys, other.keys) and (
        np.array_equal(one.states, other.states, equal_nan=True))


def test_reads_no_file_again_and_holds_the_same(library, shelf, read_files):
    assert (library.path / index.CACHE).exists()
    opened = EpisodeLibrary.open(library.path, shelf.fingerprint)
    assert read_files == [] and equal(opened.index(), library.index()) and len(opened.index().ids) == 81
    for identity, views in list(zip(opened.index().ids, opened.index().views, strict=True))[::9]:
        expected = shelf.references(3, int(identity.episode[1:]), views=views)[identity.call]
        assert shelf.same(opened.load(identity), expected)


def test_only_what_changed_is_read(library, shelf, read_files):
    os.utime(library.path / 'stack/e03.h5', (7, 7))
    library.path.joinpath('stack/e04.h5').unlink()
    library.add_episode('sort', shelf.references(2), True, 'new')
    read_files.clear()
    opened = EpisodeLibrary.open(library.path, shelf.fingerprint)
    assert sorted(read_files) == ['e03', 'new'] and len(opened.episodes) == 30 and opened.problems == []


@pytest.mark.parametrize('content', [b'', b'PK\3\4 no archive', None])
def test_a_damaged_index_is_made_again(library, shelf, read_files, content):
    path = library.path / index.CACHE
    path.write_bytes(path.read_bytes()[:-30] if content is None else content)
    opened = EpisodeLibrary.open(library.path, shelf.fingerprint)
    assert len(read_files) == 30 and opened.problems == [] and equal(opened.index(), library.index())
    read_files.clear()
    assert equal(EpisodeLibrary.open(library.path).index(), library.index()) and read_files == []


def test_the_index_of_another_library_is_not_believed(library, shelf, read_files):
    index.write_cache(library.path, library.episodes, {**shelf.fingerprint, 'weights': 'w2'})
    EpisodeLibrary.open(library.path, shelf.fingerprint)
    assert len(read_files) == 30


def test_keys_are_held_once(library):
    rows = library.index().keys
    assert all(np.shares_memory(key, rows) for e in library.episodes if e.success for key in e.keys)
