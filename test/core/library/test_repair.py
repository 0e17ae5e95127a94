# SPDX-License-Identifier: Apache-2.0
"""``verify --repair`` brings a folder into order, deletes nothing that was recorded, and says what it did."""

import json

import h5py
import pytest

from rmuscle_core.cli import main
from rmuscle_core.library import EpisodeLibrary, folder


@pytest.fixture
def library(tmp_path, shelf):
    library = EpisodeLibrary.create(tmp_path / 'library', shelf.fingerprint)
    for episode in ('one', 'two', 'three'):
        library.add_episode('stack', shelf.references(2), True, episode)
    return library


def repair(library):
    return main(['library', 'verify', str(library.path), '--repair'])


def contents(library):
    return sorted(path.read_bytes() for path in library.path.glob('stack/[!.]*'))


def test_nothing_to_do(library, capsys):
    assert repair(library) == 0 and '3 episodes can be used; 0 problems' in capsys.readouterr().out


def test_moves_aside_brings_back_and_restores_names(library, capsys):
    with h5py.File(library.path / 'stack/one.h5', 'r+') as file:
        file['calls/00001/prefix'][0, 0] ^= 1  # seen only when every byte is read
    (library.path / 'stack/two.h5').rename(library.path / 'stack/two (copy).h5')
    (library.path / 'stack/three.h5').rename(library.path / 'stack/three.h5.bad')
    (library.path / 'stack/.four.h5.tmp').touch()
    (library.path / 'stack/.gone.used').touch()
    before = contents(library)
    assert repair(library) == 1
    told = capsys.readouterr().out
    for word in ('one.h5.bad', 'two (copy).h5 is whole', 'three.h5.bad is whole', '.four.h5.tmp was left',
                 '2 episodes can be used; 3 problems repaired, 0 left'):
        assert word in told
    assert [path.name for path in sorted(library.path.glob('stack/*'))] == ['one.h5.bad', 'three.h5', 'two.h5']
    assert contents(library) == before and list(library.path.glob('stack/.*')) == []
    assert repair(library) == 0


def test_two_files_of_one_name_are_both_kept(library):
    copy = library.path / 'stack/copy.h5'
    copy.write_bytes((library.path / 'stack/one.h5').read_bytes())
    (library.path / 'stack/copy.h5.bad').write_bytes(b'an earlier one')
    before = contents(library)
    assert repair(library) == 1 and (library.path / 'stack/copy.h5.bad2').exists()
    assert contents(library) == before


@pytest.mark.parametrize('content', [None, '', '{"books": []}'])
def test_a_lost_library_json_is_made_again(library, shelf, capsys, content):
    path = library.path / 'library.json'
    original = path.read_text()
    path.unlink() if content is None else path.write_text(content)
    assert main(['library', 'verify', str(library.path)]) == 3 and '--repair' in capsys.readouterr().err
    assert repair(library) == 1 and path.read_text() == original
    assert len(EpisodeLibrary.open(library.path, shelf.fingerprint).episodes) == 3


def test_what_it_cannot_tell_is_left_to_a_person(library, shelf, tmp_path, capsys):
    other = EpisodeLibrary.create(tmp_path / 'other', {**shelf.fingerprint, 'weights': 'w2'})
    other.add_episode('stack', shelf.references(2), True, 'four').rename(library.path / 'stack/four.h5')
    (library.path / 'library.json').unlink()
    before = contents(library)
    assert repair(library) == 3 and 'do not tell' in capsys.readouterr().err and contents(library) == before


def test_a_later_version_and_a_folder_of_another_kind_are_left_alone(library, tmp_path):
    path = library.path / 'library.json'
    path.write_text(json.dumps({**json.loads(path.read_text()), 'version': 2}))
    before = path.read_text()
    assert repair(library) == 3 and path.read_text() == before
    (tmp_path / 'home').mkdir()
    (tmp_path / 'home/.notes.h5.tmp').touch()
    assert main(['library', 'verify', str(tmp_path / 'home'), '--repair']) == 3
    assert (tmp_path / 'home/.notes.h5.tmp').exists()
    assert main(['library', 'verify', str(tmp_path / 'absent'), '--repair']) == 3


def test_not_while_another_process_writes(library, capsys):
    with folder.lock(library.path):
        assert repair(library) == 3 and 'another process is writing' in capsys.readouterr().err


def test_info_names_what_is_deleted_first(library, shelf, capsys):
    library.add_episode('stack', shelf.references(2), False, 'failed')
    (library.path / 'stack/x.h5.bad').touch()
    assert main(['library', 'info', str(library.path), '--json']) == 0
    found = json.loads(capsys.readouterr().out)
    assert found['evicted_first'][0]['episode'] == 'stack/failed' and found['set_aside'] == 1
    assert main(['library', 'info', str(library.path)]) == 0
    assert 'stack/failed: failure, last used' in capsys.readouterr().out
