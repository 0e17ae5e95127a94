# SPDX-License-Identifier: Apache-2.0
"""Files made to mislead cost one episode: nothing outside is read, nothing large allocated, no name believed."""

import hashlib
import json
import os
from dataclasses import replace
from types import SimpleNamespace

import h5py
import numpy as np
import pytest

from rmuscle_core.errors import EpisodeError, LibraryError
from rmuscle_core.library import EpisodeLibrary, ReferenceId
from rmuscle_core.library.fitting import check_fits


@pytest.fixture
def library(tmp_path, shelf):
    library = EpisodeLibrary.create(tmp_path / 'library', shelf.fingerprint)
    for episode in ('one', 'three', 'two'):
        library.add_episode('stack', shelf.references(), True, episode)
    return library


@pytest.fixture
def path(library):
    return library.path / 'stack/one.h5'


def refused(library, shelf, word):
    """Whether just 'one' is refused, for a reason with this word, when it is opened or loaded."""
    opened = EpisodeLibrary.open(library.path, shelf.fingerprint)
    if not opened.problems:
        with pytest.raises(EpisodeError):
            opened.load(ReferenceId('stack', 'one', 1))
    assert [e.episode for e in opened.episodes] == ['three', 'two']
    assert len(opened.problems) == 1 and word in opened.problems[0], opened.problems
    return all(shelf.same(opened.load(i), shelf.references()[i.call]) for i in opened.index().ids)


def write_header(file, header):
    text = json.dumps(header).encode()
    del file['header']
    file['header'] = np.bytes_(text)
    file.attrs['header_blake2b'] = hashlib.blake2b(text, digest_size=16).hexdigest()


@pytest.mark.parametrize('name', ['key', 'prefix'])
@pytest.mark.parametrize('make, word', [
    (lambda group, name, other: group.__setitem__(name, h5py.SoftLink(f'/calls/00000/{name}')), 'SoftLink'),
    (lambda group, name, other: group.__setitem__(name, h5py.ExternalLink(other, f'/calls/00001/{name}')), 'External'),
    (lambda group, name, other: group.create_dataset(name, (2, 24), 'f4', external=[('/etc/passwd', 0, 192)]), '00001'),
    (lambda group, name, other: group.create_dataset(name, data=['text'], dtype=h5py.string_dtype()), 'calls/00001'),
    (lambda group, name, other: group.create_dataset(name, shape=(0, 0), dtype='<f4'), 'calls/00001'),
    (lambda group, name, other: group.create_group(name), 'one.h5')],
    ids=['soft link', 'external link', 'external data', 'objects', 'empty', 'group'])
def test_a_dataset_that_is_something_else(library, shelf, path, name, make, word):
    with h5py.File(path, 'r+') as file:
        group = file['calls/00001']
        del group[name]
        make(group, name, str(library.path / 'stack/two.h5'))
    assert refused(library, shelf, word)


def test_a_virtual_dataset(library, shelf, path):
    with h5py.File(path, 'r+') as file:
        layout = h5py.VirtualLayout((2, 24), '<f4')
        layout[...] = h5py.VirtualSource(str(library.path / 'stack/two.h5'), '/calls/00001/key', (2, 24), '<f4')
        del file['calls/00001/key']
        file['calls/00001'].create_virtual_dataset('key', layout)
    assert refused(library, shelf, 'key')


def test_calls_that_lie_in_another_file(library, shelf, path):
    with h5py.File(path, 'r+') as file:
        del file['calls']
        file['calls'] = h5py.ExternalLink(str(library.path / 'stack/two.h5'), '/calls')
    assert refused(library, shelf, 'ExternalLink')


def nested(depth):
    return json.loads('[' * depth + ']' * depth)


@pytest.mark.parametrize('change, word', [
    (lambda h: h.update(task='../up'), 'says that it is'), (lambda h: h.update(episode=3), 'as specified'),
    (lambda h: h.update(calls=[]), 'as specified'), (lambda h: h.update(calls={'0': {}}), 'as specified'),
    (lambda h: h.update(further=1), 'further'), (lambda h: h.pop('success'), 'success'),
    (lambda h: h.update(fingerprint=['weights']), 'as specified'),
    (lambda h: h['fingerprint'].pop('weights'), 'weights'),
    (lambda h: h['calls'][1].update(views=['top']), 'for 1 views'),
    (lambda h: h['calls'][1].update(views=[2]), 'views'),
    (lambda h: h['calls'][1]['datasets'].pop('chunk'), 'datasets'), (lambda h: h['calls'].append(nested(90)), 'call 4'),
    (lambda h: h['calls'][1]['datasets'].update({'../../x': {}}), 'datasets'),
    (lambda h: h['calls'][1]['datasets']['key'].update(shape=[-2, 24]), 'positive'),
    (lambda h: h['calls'][1]['datasets']['key'].update(shape=[2, 1 << 62]), 'positive'),
    (lambda h: h['calls'][1]['datasets']['key'].update(shape=[2, 1 << 30]), 'expected'),
    (lambda h: h['calls'][1]['datasets']['key'].update(dtype='|O'), 'expected'),
    (lambda h: h['calls'].append(h['calls'][0]), '00004')])
def test_a_header_that_says_something_else_with_a_checksum_that_agrees(library, shelf, path, change, word):
    with h5py.File(path, 'r+') as file:
        header = json.loads(file['header'][()])
        change(header)
        write_header(file, header)
    assert refused(library, shelf, word)


@pytest.mark.parametrize('value', [np.zeros(0), np.array(['a', 'b'], 'S1'), h5py.Empty('f4'), 7])
@pytest.mark.parametrize('name', ['format', 'version', 'header_blake2b'])
def test_an_attribute_of_another_kind(library, shelf, path, name, value):
    with h5py.File(path, 'r+') as file:
        file.attrs[name] = value
    assert refused(library, shelf, 'one.h5')


@pytest.mark.parametrize('name', ['with space.h5', 'ünï.h5', 'a\nb.h5', 'x' * 200 + '.h5', '-.h5'])
def test_a_name_that_no_episode_has(library, shelf, path, name):
    path.rename(path.with_name(name))
    assert refused(library, shelf, name[:20].split('\n')[0])


@pytest.mark.parametrize('make', [os.mkfifo, os.mkdir, lambda path: path.symlink_to('/dev/zero'),
                                  lambda path: path.symlink_to('nowhere')])
def test_what_is_no_regular_file(library, shelf, path, make):
    path.unlink()
    make(path)
    assert refused(library, shelf, 'one.h5')


def test_files_of_the_system_are_not_ours(library, shelf):
    (library.path / 'stack/._one.h5').write_bytes(b'of another system')
    (library.path / '.trash').mkdir()
    opened = EpisodeLibrary.open(library.path, shelf.fingerprint)
    assert opened.problems == [] and (library.path / 'stack/._one.h5').exists()


def test_one_episode_of_other_widths_does_not_outvote_the_others(library, shelf, path):
    path.unlink()
    narrow = [replace(r, states=r.states[:, :2]) for r in shelf.references()]
    other = EpisodeLibrary.create(library.path.parent / 'other', shelf.fingerprint)
    other.add_episode('stack', narrow, True, 'one').rename(path)
    assert refused(library, shelf, 'numbers')
    with pytest.raises(LibraryError, match='numbers'):
        library.add_episode('stack', narrow, True, 'new')
    known = EpisodeLibrary.open(library.path, shelf.fingerprint, set_aside=False, widths=(24, 2))
    assert known.episodes == [] and len(known.problems) == 2


@pytest.mark.parametrize('content', [
    '', '[]', '"text"', '[' * 100_000, '{"format": "rmuscle-library", "version": 1}', '\udcff', '{' + ' ' * (1 << 20),
    '{"format": "rmuscle-library", "version": 1, "fingerprint": {}}',
    '{"format": "rmuscle-library", "version": 1, "fingerprint": {"weights": ""}}',
    '{"format": "rmuscle-library", "version": 1, "fingerprint": {"images": "64x64"}}',
    '{"format": "rmuscle-library", "version": 1, "fingerprint": {"weights": {"a": 1}}}',
    '{"format": "rmuscle-library", "version": 1, "fingerprint": [["weights", "w1"]]}',
    '{"format": "rmuscle-library", "version": [1], "fingerprint": {"weights": "w1"}}',
    '{"format": "lerobot", "version": 1, "fingerprint": {"weights": "w1"}}'])
def test_v30_a_foreign_library_json_is_refused_also_without_weights(library, shelf, content):
    path = library.path / 'library.json'
    path.write_bytes(content.encode(errors='surrogateescape'))
    for fingerprint in (shelf.fingerprint, None):
        with pytest.raises(LibraryError, match='library') as refusal:
            EpisodeLibrary.open(library.path, fingerprint)
        assert '\n' not in str(refusal.value)


CONFIG = SimpleNamespace(cameras=('top', 'wrist'), prefix=SimpleNamespace(width=24), vocab=520,
                         expert=SimpleNamespace(mlp=64))
SHAPE = SimpleNamespace(groups=2, action_layers=3, masked=40)


@pytest.mark.parametrize('field, place, value', [('neurons', (1, 2, 39), 64), ('neurons', (0, 0, 0), 65535),
                                                 ('token_ids', 10, 520), ('token_ids', 0, -1)])
def test_indices_out_of_range_are_refused_before_a_gpu_sees_them(library, shelf, field, place, value):
    good = shelf.references()[1]
    check_fits(good, CONFIG, SHAPE)
    array = getattr(good, field).copy()
    array[place] = value
    references = [good, replace(good, **{field: array})]
    library.add_episode('stack', references, True, 'bad')
    assert library.load(ReferenceId('stack', 'bad', 0), lambda r: check_fits(r, CONFIG, SHAPE))
    with pytest.raises(EpisodeError, match=f'stack/bad#1 does not fit this checkpoint: {field}'):
        library.load(ReferenceId('stack', 'bad', 1), lambda r: check_fits(r, CONFIG, SHAPE))
    assert 'bad' not in {i.episode for i in library.index().ids} and len(library.problems) == 1


@pytest.mark.parametrize('change, field', [(lambda r: replace(r, views=('top', 'side')), 'views'),
                                           (lambda r: replace(r, prefix=r.prefix[:, :8]), 'prefix'),
                                           (lambda r: replace(r, neurons=r.neurons[:1]), 'neurons')])
def test_other_sizes_do_not_fit(shelf, change, field):
    with pytest.raises(EpisodeError, match=field):
        check_fits(change(shelf.references()[0]), CONFIG, SHAPE)
