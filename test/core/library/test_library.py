# SPDX-License-Identifier: Apache-2.0
"""Adding, finding and loading references; a library of another checkpoint is refused by field."""

import json
import threading

import numpy as np
import pytest

from rmuscle_core.errors import EpisodeError, LibraryError
from rmuscle_core.library import EpisodeLibrary, ReferenceId


@pytest.fixture
def library(tmp_path, shelf):
    return EpisodeLibrary.create(tmp_path / 'library', shelf.fingerprint)


def test_what_is_added_is_loaded_bit_for_bit(library, shelf):
    added = shelf.references(4)
    path = library.add_episode('stack', added, success=True, episode='one')
    assert path == library.path / 'stack' / 'one.h5'
    for opened in (library, EpisodeLibrary.open(library.path, shelf.fingerprint)):
        assert opened.tasks() == ['stack'] and opened.problems == [] and opened.nbytes == path.stat().st_size
        for call, reference in enumerate(added):
            loaded = opened.load(ReferenceId('stack', 'one', call))
            assert shelf.same(loaded, reference) and str(loaded.id) == f'stack/one#{call}'


def test_unranked_neurons_stay_none(library, shelf):
    from dataclasses import replace

    library.add_episode('stack', [replace(shelf.references(1)[0], neurons=None)], success=True, episode='one')
    assert library.load(ReferenceId('stack', 'one', 0)).neurons is None


def test_index_pads_views_and_histories(library, shelf):
    two, one = shelf.references(4), shelf.references(2, views=('top',))
    library.add_episode('stack', two, success=True, episode='one')
    library.add_episode('sort', one, success=True, episode='one')
    index = library.index()
    assert [i.task for i in index.ids] == ['sort'] * 2 + ['stack'] * 4
    assert index.views[0] == ('top',) and index.keys.shape == (6, 2, 24) and index.states.shape == (6, 3, 5)
    assert not index.keys[0, 1].any() and np.array_equal(index.keys[2], two[0].key)
    assert np.isnan(index.states[2, :2]).all() and np.array_equal(index.states[5], two[3].states)


def test_a_failed_episode_is_kept_but_not_offered(library, shelf):
    library.add_episode('stack', shelf.references(), success=False)
    assert len(library.episodes) == 1 and library.index().ids == ()


@pytest.mark.parametrize('changes, named', [({'task': '../up'}, 'task'), ({'episode': 'a/b'}, 'episode'),
                                            ({'task': 'x' * 300}, 'task'), ({'references': []}, 'no policy calls')])
def test_what_cannot_be_stored_is_refused(library, shelf, changes, named):
    with pytest.raises(LibraryError, match=named):
        library.add_episode(**{'task': 'stack', 'references': shelf.references(), 'success': True, **changes})
    assert list(library.path.glob('**/*.h5')) == []


def test_an_episode_is_never_overwritten(library, shelf):
    path = library.add_episode('stack', shelf.references(seed=0), success=True, episode='one')
    before = path.read_bytes()
    with pytest.raises(LibraryError, match='exists already'):
        library.add_episode('stack', shelf.references(seed=1), success=True, episode='one')
    assert path.read_bytes() == before


def test_non_finite_references_are_refused_and_leave_nothing(library, shelf):
    broken = shelf.references()
    broken[2].chunk[1, 3] = np.nan
    with pytest.raises(LibraryError, match=r'chunk of stack/one#2'):
        library.add_episode('stack', broken, success=True)
    assert list(library.path.glob('stack/*')) + list(library.path.glob('stack/.*')) == []


def test_a_write_error_is_one_sentence_and_the_library_stays(library, shelf):
    (library.path / 'stack').write_text('a file where the folder should be')
    with pytest.raises(LibraryError, match='could not be written'):
        library.add_episode('stack', shelf.references(), success=True)
    assert library.episodes == []


def test_unknown_references_are_refused_without_harm(library, shelf):
    library.add_episode('stack', shelf.references(2), success=True, episode='one')
    for absent in (ReferenceId('stack', 'two', 0), ReferenceId('stack', 'one', 2)):
        with pytest.raises(EpisodeError, match=str(absent)):
            library.load(absent)
    assert len(library.episodes) == 1


@pytest.mark.parametrize('field', ['weights', 'images'])
def test_a_foreign_fingerprint_is_refused_naming_the_field(library, shelf, field):
    with pytest.raises(LibraryError, match=f'another {field}'):
        EpisodeLibrary.open(library.path, {**shelf.fingerprint, field: 'other'})


def test_an_unknown_fact_is_not_compared(library, shelf):
    EpisodeLibrary.open(library.path, {**shelf.fingerprint, 'joints': 'a b'})
    EpisodeLibrary.open(library.path)


def test_create_refuses_a_library_and_open_refuses_none(library, shelf, tmp_path):
    with pytest.raises(LibraryError, match='already'):
        EpisodeLibrary.create(library.path, shelf.fingerprint)
    with pytest.raises(LibraryError, match='no library at'):
        EpisodeLibrary.open(tmp_path / 'absent', shelf.fingerprint)
    assert EpisodeLibrary.open_or_create(tmp_path / 'new', shelf.fingerprint).episodes == []
    assert EpisodeLibrary.open_or_create(library.path, shelf.fingerprint).path == library.path


def test_a_library_of_a_later_version_is_refused_as_a_whole(library, shelf):
    path = library.path / 'library.json'
    path.write_text(json.dumps({**json.loads(path.read_text()), 'version': 2}))
    with pytest.raises(LibraryError, match='version 2'):
        EpisodeLibrary.open(library.path, shelf.fingerprint)


def test_one_thread_adds_while_another_loads(library, shelf):
    expected = shelf.references(3)
    library.add_episode('stack', expected, success=True, episode='e000')
    failures, done = [], threading.Event()

    def read():
        while not done.is_set():
            for identity in library.index().ids:
                if not shelf.same(library.load(identity), expected[identity.call]):
                    failures.append(identity)

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(1, 8):
        library.add_episode('stack', expected, success=True, episode=f'e{number:03d}')
    done.set()
    reader.join()
    assert failures == [] and library.problems == [] and len(library.index().ids) == 24


@pytest.mark.parametrize('name', ['n' * 300, 'nul\0', 'file', 'file/inside'])
def test_a_place_that_cannot_hold_a_library_is_refused(tmp_path, shelf, name):
    (tmp_path / 'file').touch()
    with pytest.raises(LibraryError, match='folder'):
        EpisodeLibrary.open_or_create(tmp_path / name, shelf.fingerprint)


def test_a_library_that_another_process_creates_meanwhile_is_opened(tmp_path, shelf, monkeypatch):
    create = EpisodeLibrary.create

    def overtaken(path, fingerprint, widths):
        create(path, fingerprint).add_episode('stack', shelf.references(), success=True)
        return create(path, fingerprint, widths)

    monkeypatch.setattr(EpisodeLibrary, 'create', overtaken)
    assert EpisodeLibrary.open_or_create(tmp_path / 'library', shelf.fingerprint).tasks() == ['stack']
