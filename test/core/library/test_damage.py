# SPDX-License-Identifier: Apache-2.0
"""Damaged, foreign or hostile episode files cost one episode, never the library and never a wrong answer."""

import hashlib
import json
import os

import h5py
import numpy as np
import pytest

from rmuscle_core.errors import EpisodeError, LibraryError
from rmuscle_core.library import EpisodeLibrary
from rmuscle_core.library.episode import verify_episode


@pytest.fixture
def library(tmp_path, shelf):
    library = EpisodeLibrary.create(tmp_path / 'library', shelf.fingerprint)
    for episode in ('one', 'two'):
        library.add_episode('stack', shelf.references(), success=True, episode=episode)
    return library


def test_what_was_put_right_is_taken_in_when_the_folder_is_read_again(library):
    path, good = library.path / 'stack/two.h5', (library.path / 'stack/two.h5').read_bytes()
    truncate(path)
    opened = EpisodeLibrary.open(library.path)
    assert [e.episode for e in opened.episodes] == ['one'] and len(opened.problems) == 1
    path.write_bytes(good)  # restored, as the problem says
    opened.refresh(again=True)
    assert [e.episode for e in opened.episodes] == ['one', 'two'] and opened.problems == []


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def empty(path):
    os.truncate(path, 0)


def later_version(path):
    with h5py.File(path, 'r+') as file:
        file.attrs['version'] = 2


def other_kind(path):
    with h5py.File(path, 'r+') as file:
        file.attrs['format'] = 'robomimic'


def no_header(path):
    with h5py.File(path, 'r+') as file:
        del file['header']


def huge_shape(path):
    with h5py.File(path, 'r+') as file:
        del file['calls/00001/key']
        file['calls/00001'].create_dataset('key', shape=(1 << 20, 1 << 20), dtype='<f4')


def zip_bomb(path):
    with h5py.File(path, 'r+') as file:
        shape = file['calls/00001/key'].shape
        del file['calls/00001/key']
        file['calls/00001'].create_dataset('key', data=np.zeros(shape, '<f4'), chunks=shape, compression='gzip')


def other_values(path):
    with h5py.File(path, 'r+') as file:
        file['calls/00001/states'][0, 0] += 1


def renamed(path):
    path.rename(path.with_name('three.h5'))


def text(path):
    path.write_text('not an HDF5 file')


@pytest.mark.parametrize('damage', [truncate, empty, later_version, other_kind, no_header, huge_shape, zip_bomb,
                                    other_values, renamed, text])
def test_a_bad_file_is_set_aside_and_the_others_stay(library, shelf, damage):
    path = library.path / 'stack' / 'one.h5'
    damage(path)
    looked = EpisodeLibrary.open(library.path, shelf.fingerprint, set_aside=False)
    assert [e.episode for e in looked.episodes] == ['two'] and len(looked.problems) == 1
    assert str(path.parent) in looked.problems[0] and not list(path.parent.glob('*.bad'))
    opened = EpisodeLibrary.open(library.path, shelf.fingerprint)
    assert len(opened.problems) == 1 and len(list(path.parent.glob('*.h5.bad'))) == 1
    assert all(shelf.same(opened.load(i), shelf.references()[i.call]) for i in opened.index().ids)
    assert EpisodeLibrary.open(library.path, shelf.fingerprint).problems == []


def test_an_episode_of_another_checkpoint_is_set_aside(library, shelf, tmp_path):
    other = EpisodeLibrary.create(tmp_path / 'other', {**shelf.fingerprint, 'weights': 'w2'})
    other.add_episode('stack', shelf.references(), success=True, episode='three').rename(
        library.path / 'stack' / 'three.h5')
    opened = EpisodeLibrary.open(library.path, shelf.fingerprint)
    assert len(opened.episodes) == 2 and 'weights' in opened.problems[0]


def test_damage_in_a_large_dataset_is_found_when_it_is_loaded(library, shelf):
    with h5py.File(library.path / 'stack' / 'one.h5', 'r+') as file:
        file['calls/00002/prefix'][3, 3] ^= 1
    opened = EpisodeLibrary.open(library.path, shelf.fingerprint)
    bad = next(i for i in opened.index().ids if (i.episode, i.call) == ('one', 2))
    with pytest.raises(EpisodeError, match=r'checksum of /calls/00002/prefix'):
        opened.load(bad)
    assert {i.episode for i in opened.index().ids} == {'two'} and len(opened.problems) == 1


def test_a_consistent_claim_of_a_huge_dataset_allocates_nothing(library, shelf):
    path, shape = library.path / 'stack' / 'one.h5', [2, 1 << 27]
    with h5py.File(path, 'r+') as file:
        header = json.loads(file['header'][()])
        header['calls'][1]['datasets']['key']['shape'] = shape
        text = json.dumps(header).encode()
        del file['header'], file['calls/00001/key']
        file['header'] = np.bytes_(text)
        file.attrs['header_blake2b'] = hashlib.blake2b(text, digest_size=16).hexdigest()
        file['calls/00001'].create_dataset('key', shape=shape, dtype='<f4')
    opened = EpisodeLibrary.open(library.path, shelf.fingerprint)
    assert f'claims {1 << 30} bytes' in opened.problems[0] and len(opened.episodes) == 1


@pytest.mark.parametrize('seed', range(30))
def test_a_flipped_byte_is_refused_or_harmless(library, shelf, seed):
    path = library.path / 'stack' / 'one.h5'
    content = bytearray(path.read_bytes())
    random = np.random.default_rng(seed)
    # half of the places in the file's own structures, which are a small part of it
    place = int(random.integers(len(content) if seed % 2 else 2048))
    content[place] ^= int(random.integers(1, 256))
    path.write_bytes(content)
    opened = EpisodeLibrary.open(library.path, shelf.fingerprint, set_aside=False)
    for identity in opened.index().ids:
        try:
            loaded = opened.load(identity)
        except LibraryError as refusal:
            assert 'one' in str(refusal)
        else:
            assert shelf.same(loaded, shelf.references()[identity.call])
    assert 'two' in [e.episode for e in opened.episodes]


def test_a_place_that_cannot_be_written_is_only_reported(library, shelf, monkeypatch):
    truncate(library.path / 'stack' / 'one.h5')

    def refuse(*_):
        raise PermissionError('read-only file system')

    monkeypatch.setattr(os, 'replace', refuse)
    opened = EpisodeLibrary.open(library.path, shelf.fingerprint)
    assert len(opened.episodes) == 1 and 'read-only' in opened.problems[1]


def test_verify_reads_everything(library):
    path = library.path / 'stack' / 'two.h5'
    assert len(verify_episode(path).calls) == 4
    with h5py.File(path, 'r+') as file:
        file['calls/00003/neurons'][0, 0, 0] ^= 1
    with pytest.raises(EpisodeError, match='neurons'):
        verify_episode(path)
