# SPDX-License-Identifier: Apache-2.0
"""A capacity is kept by deleting failures first, then what served longest ago; use is remembered over restarts."""

import errno
import os

import pytest

from rmuscle_core.errors import EpisodeError
from rmuscle_core.library import EpisodeLibrary, ReferenceId
from rmuscle_core.library.usage import Usage, eviction_order


@pytest.fixture
def library(tmp_path, shelf):
    """Episodes e0 to e4, recorded at 1000, 1010, ...; e2 failed."""
    library = EpisodeLibrary.create(tmp_path / 'library', shelf.fingerprint)
    for number in range(5):
        path = library.add_episode('stack', shelf.references(2), number != 2, f'e{number}')
        os.utime(path, (1000 + 10 * number,) * 2)
    return EpisodeLibrary.open(library.path)


def order(library):
    return [e.episode for e in eviction_order(library.episodes)]


def use(library, episode, seconds):
    library._usage = Usage(clock=lambda: seconds)
    library.used(ReferenceId('stack', episode, 1))
    library.load(ReferenceId('stack', episode, 1))


def test_failures_then_the_least_recently_used_then_the_oldest(library):
    assert order(library) == ['e2', 'e0', 'e1', 'e3', 'e4']
    use(library, 'e0', 2000)
    use(library, 'e3', 1005)  # an earlier use than its recording changes nothing
    assert order(library) == ['e2', 'e1', 'e3', 'e4', 'e0']
    assert order(EpisodeLibrary.open(library.path)) == ['e2', 'e1', 'e3', 'e4', 'e0']  # after a restart too


def test_use_changes_no_episode_file(library):
    before = {e.path: (e.path.read_bytes(), e.path.stat().st_mtime_ns) for e in library.episodes}
    use(library, 'e0', 2000)
    assert before == {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in before}


def test_deletes_just_what_exceeds_the_capacity(library, shelf, caplog):
    new = library.add_episode('stack', shelf.references(2), True, 'new')
    os.utime(new, (1, 1))  # the oldest, but just recorded
    use(library, 'e0', 2000)
    caplog.set_level('INFO')
    capacity = sum(e.nbytes for e in library.episodes if e.episode in ('e0', 'e4', 'new'))
    assert library.evict(0) == [] and library.evict(library.nbytes) == []
    assert [e.episode for e in library.evict(capacity, keep=new)] == ['e2', 'e1', 'e3']
    assert 'e2 was deleted' in caplog.text and 'capacity' in caplog.text
    for opened in (library, EpisodeLibrary.open(library.path)):
        assert [e.episode for e in opened.episodes] == ['e0', 'e4', 'new'] and opened.nbytes == capacity
        assert opened.problems == []
    assert {i.episode for i in library.index().ids} == {'e0', 'e4', 'new'}


def test_what_another_process_wrote_counts_and_may_go(library, shelf):
    other = EpisodeLibrary.open(library.path)
    os.utime(other.add_episode('stack', shelf.references(2), False, 'other'), (1, 1))
    assert [e.episode for e in library.evict(library.nbytes)] == ['other']


def test_a_reader_of_an_evicted_episode_goes_on(library, shelf):
    reader = EpisodeLibrary.open(library.path, shelf.fingerprint)
    with reader.episodes[0].path.open('rb') as file:
        library.evict(1)
        assert file.read()  # what is open stays whole
    with pytest.raises(EpisodeError, match='was removed meanwhile'):
        reader.load(ReferenceId('stack', 'e0', 0))
    assert reader.problems == [] and 'e0' not in {i.episode for i in reader.index().ids}
    assert list(library.path.glob('*/*')) == []


def test_what_cannot_be_deleted_is_a_problem_and_stays_in_use(library, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, 'Permission denied')

    monkeypatch.setattr(os, 'unlink', refuse)
    assert library.evict(1) == [] and len(library.episodes) == 5
    assert 'could not be brought to its capacity' in library.problems[0] and 'let this user' in library.problems[0]
