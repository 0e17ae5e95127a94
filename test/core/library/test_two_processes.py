# SPDX-License-Identifier: Apache-2.0
"""Several processes use one library at the same time, by their own files and one lock."""

import subprocess
import sys
from pathlib import Path

import pytest

from rmuscle_core.library import EpisodeLibrary, folder
from rmuscle_core.library.episode import verify_episode

WRITER = """
import sys
sys.path.insert(0, sys.argv[2])
import conftest
from rmuscle_core.library import EpisodeLibrary
library = EpisodeLibrary.open_or_create(sys.argv[1], conftest.FINGERPRINT)
print('ready', flush=True)
sys.stdin.readline()
for number in range(12):
    library.add_episode('stack', conftest.references(3), True, f'{sys.argv[3]}-{number:02d}')
"""


def start(path, name):
    arguments = [sys.executable, '-c', WRITER, str(path), str(Path(__file__).parent), name]
    return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def path(tmp_path):
    return tmp_path / 'library'


def test_v29_two_writers_and_a_reader(path, shelf):
    writers = [start(path, name) for name in 'ab']
    for writer in writers:
        assert writer.stdout.readline() == 'ready\n'
    for writer in writers:
        writer.stdin.write('\n')
        writer.stdin.flush()
    reader = EpisodeLibrary.open(path, shelf.fingerprint)
    while any(writer.poll() is None for writer in writers):
        reader.refresh()
        assert all(shelf.same(reader.load(i), shelf.references(3)[i.call]) for i in reader.index().ids)
    assert [writer.returncode for writer in writers] == [0, 0]
    for writer in writers:
        writer.communicate()
    reader.refresh()
    opened = EpisodeLibrary.open(path, shelf.fingerprint)
    for library in (reader, opened):
        assert {e.episode for e in library.episodes} == {f'{name}-{i:02d}' for name in 'ab' for i in range(12)}
        assert library.problems == []
    assert all(len(verify_episode(e.path).calls) == 3 for e in opened.episodes)


def test_leftovers_go_at_opening_but_not_those_of_a_writer_at_work(path, shelf):
    EpisodeLibrary.create(path, shelf.fingerprint).add_episode('stack', shelf.references(), True)
    left, foreign = path / 'stack/.one.h5.tmp', path / 'stack/.notes.tmp'
    left.touch()
    foreign.touch()
    with folder.lock(path):
        EpisodeLibrary.open(path, shelf.fingerprint)
        assert left.exists()
    EpisodeLibrary.open(path, shelf.fingerprint, set_aside=False)
    assert left.exists()  # only looking changes nothing
    EpisodeLibrary.open(path, shelf.fingerprint)
    assert not left.exists() and foreign.exists()


def test_a_file_system_without_locks_is_written_to_and_not_tidied(path, shelf, monkeypatch):
    import errno

    library = EpisodeLibrary.create(path, shelf.fingerprint)
    library.add_episode('stack', shelf.references(), True, 'one')
    (path / 'stack/.other.h5.tmp').touch()

    def refuse(*_):
        raise OSError(errno.ENOLCK, 'No locks available')

    monkeypatch.setattr(folder.fcntl, 'flock', refuse)
    library.add_episode('stack', shelf.references(), True, 'two')
    assert len(EpisodeLibrary.open(path).episodes) == 2 and (path / 'stack/.other.h5.tmp').exists()
