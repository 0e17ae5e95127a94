# SPDX-License-Identifier: Apache-2.0
"""V29: a disk that is full, read-only, slow to agree or gone: one sentence, no crash, and the library as it was."""

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rmuscle_core.errors import EpisodeError, LibraryError
from rmuscle_core.library import EpisodeLibrary, ReferenceId, durable, folder, hdf5_file
from rmuscle_core.library.recording import RecordedEpisode, write_recording


@pytest.fixture
def library(tmp_path, shelf):
    library = EpisodeLibrary.create(tmp_path / 'library', shelf.fingerprint)
    library.add_episode('stack', shelf.references(), True, 'kept')
    return library


@pytest.fixture
def file_size_limit():
    """A limit on the size of files, which fails writes in the kernel as a full disk does."""
    limits, action = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, action)


def unchanged(library, shelf):
    opened = EpisodeLibrary.open(library.path, shelf.fingerprint)
    return (opened.problems == [] and [e.episode for e in opened.episodes] == ['kept']
            and shelf.same(opened.load(ReferenceId('stack', 'kept', 2)), shelf.references()[2])
            and not list(library.path.glob('*/.*.tmp')))


def test_v29_the_disk_is_full_at_any_size(library, shelf, file_size_limit):
    size = (library.path / 'stack/kept.h5').stat().st_size
    for limit in range(0, size, size // 40):
        file_size_limit(limit)
        with pytest.raises(LibraryError, match='could not be written') as refusal:
            library.add_episode('stack', shelf.references(), True, 'new')
        assert '\n' not in str(refusal.value) and 'File too large' in str(refusal.value)
        file_size_limit(resource.RLIM_INFINITY)
        assert unchanged(library, shelf)
    library.add_episode('stack', shelf.references(), True, 'new')  # the same name: nothing of the failures is left


def test_v29_a_recording_that_finds_the_disk_full_leaves_nothing(tmp_path, file_size_limit):
    file_size_limit(4096)
    with pytest.raises(OSError):
        write_recording(tmp_path / 'r.h5', [RecordedEpisode(f'episode {i}', True, []) for i in range(200)])
    file_size_limit(resource.RLIM_INFINITY)
    assert list(tmp_path.iterdir()) == []


# HDF5's own writing loses the reason of a failed write and may crash the process; ours must end well in a new process
FULL = """
import resource, sys
sys.path.insert(0, sys.argv[2])
import conftest
from rmuscle_core.errors import LibraryError
from rmuscle_core.library import EpisodeLibrary
library = EpisodeLibrary.open(sys.argv[1])
for limit in range(0, 40000, 1000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        library.add_episode('stack', conftest.references(8), True)
    except LibraryError:
        print('refused')
"""


def test_v29_a_process_that_met_a_full_disk_ends_without_a_crash(library, shelf):
    done = subprocess.run([sys.executable, '-c', FULL, str(library.path), str(Path(__file__).parent)],
                          capture_output=True, text=True)
    assert (done.returncode, done.stdout.count('refused'), done.stderr) == (0, 40, '')
    assert unchanged(library, shelf)


SYSCALLS = [(durable.os, 'fsync'), (durable.os, 'replace'), (durable.os, 'open'), (hdf5_file.os, 'pwrite'),
            (hdf5_file.os, 'ftruncate'), (folder.fcntl, 'flock'), (os, 'mkdir')]


@pytest.mark.parametrize('code', [errno.ENOSPC, errno.EIO, errno.ESTALE],
                         ids=errno.errorcode.get)
@pytest.mark.parametrize('module, call', SYSCALLS, ids=[call for _, call in SYSCALLS])
def test_v29_each_step_of_writing_may_fail(library, shelf, monkeypatch, module, call, code):
    real, count, failing, path = getattr(module, call), 0, 0, None

    def sometimes(*arguments, **options):
        nonlocal count
        count += 1
        if count == failing:
            raise OSError(code, os.strerror(code))
        return real(*arguments, **options)

    while path is None:
        failing, count = failing + 1, 0
        with monkeypatch.context() as patch:
            patch.setattr(module, call, sometimes)
            try:
                path = library.add_episode('sort', shelf.references(1), True, 'new')
                continue
            except LibraryError as refusal:
                assert 'could not be written' in str(refusal) and os.strerror(code) in str(refusal)
        assert unchanged(library, shelf)
        shutil.rmtree(library.path / 'sort', ignore_errors=True)
    assert failing > 1 and path.exists()  # it failed at least once, and when nothing fails any more it is there


@pytest.mark.parametrize('code, step', [(errno.ENOSPC, 'library_capacity'), (errno.EROFS, 'read-only'),
                                        (errno.EACCES, 'let this user write')])
def test_the_sentence_says_what_helps(library, shelf, monkeypatch, code, step):
    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(durable.os, 'fsync', refuse)
    with pytest.raises(LibraryError, match=step):
        library.add_episode('stack', shelf.references(), True)


def test_a_folder_that_may_only_be_read_serves_and_does_not_save(library, shelf, monkeypatch):
    """As on a read-only file system: every opening for writing, renaming and removing is refused."""
    real = os.open

    def read_only(path, flags, *more, **options):
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real(path, flags, *more, **options)

    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    (library.path / 'stack/broken.h5').write_bytes(b'')
    (library.path / 'stack/.left.h5.tmp').write_bytes(b'')
    opening = open
    monkeypatch.setattr('io.open', lambda path, mode='r', *_, **__: opening(path, mode) if mode[0] == 'r' else refuse())
    monkeypatch.setattr(os, 'open', read_only)
    for call in ('replace', 'unlink', 'mkdir', 'utime'):
        monkeypatch.setattr(os, call, refuse)
    opened = EpisodeLibrary.open(library.path, shelf.fingerprint)
    assert len(opened.problems) == 2 and 'Read-only' in opened.problems[1]
    opened.used(ReferenceId('stack', 'kept', 0))
    assert shelf.same(opened.load(ReferenceId('stack', 'kept', 0)), shelf.references()[0])
    with pytest.raises(LibraryError, match='read-only: choose another'):
        opened.add_episode('stack', shelf.references(), True)
    assert (library.path / 'stack/broken.h5').exists()


def test_a_folder_that_goes_while_it_is_used(library, shelf):
    shutil.rmtree(library.path)
    with pytest.raises(LibraryError, match='the folder is gone'):
        library.add_episode('stack', shelf.references(), True)
    with pytest.raises(EpisodeError, match='no longer in the library'):
        library.load(ReferenceId('stack', 'kept', 0))
    assert library.problems == [f'the library {library.path} is gone; calls run without it until it is back and '
                                'configured again']
    with pytest.raises(LibraryError, match='cannot be read'):
        library.refresh()


def test_a_file_that_may_not_be_read_now_stays_where_it_is(library, shelf, monkeypatch):
    """Too many open files, or a permission that is missing, is no fault of the file."""
    import h5py

    def refuse(*_, **__):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(h5py, 'File', refuse)
        opened = EpisodeLibrary.open(library.path, shelf.fingerprint)
        assert opened.episodes == [] and 'Too many open files' in opened.problems[0]
    assert unchanged(library, shelf)


def test_a_task_folder_that_may_not_be_read_costs_its_episodes_only(library, shelf, monkeypatch):
    library.add_episode('sort', shelf.references(), True, 'other')
    real = os.scandir

    def scandir(path):
        if str(path).endswith('stack'):
            raise PermissionError(errno.EACCES, 'Permission denied', str(path))
        return real(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, 'scandir', scandir)
        opened = EpisodeLibrary.open(library.path, shelf.fingerprint)
        assert opened.tasks() == ['sort'] and 'stack cannot be read' in opened.problems[0]
    opened.refresh()  # the permission is back
    assert opened.tasks() == ['sort', 'stack']
