# SPDX-License-Identifier: Apache-2.0
"""Building from any source: what one episode lacks costs that episode, what the library lacks ends the build."""

from __future__ import annotations

import sys

import h5py
import pytest
from tiny_policy import CAMERAS, JOINTS, PROMPT

from rmuscle_core.errors import EpisodeError, LibraryError
from rmuscle_core.importing.build import build_library
from rmuscle_core.importing.episodes import PendingEpisode, Wanted, file_name
from rmuscle_core.importing.sources import SourceOptions, open_source
from rmuscle_core.library.recording import RecordedEpisode, Recording, write_recording
from rmuscle_core.settings import Settings


def test_an_empty_episode_of_a_recording_is_skipped(episodes, build, contents, tmp_path, capsys):
    write_recording(tmp_path / 'recording.h5', [
        RecordedEpisode('first', True, episodes[1][::4]), RecordedEpisode('empty', True, []),
        RecordedEpisode('last', False, episodes[2][::4])])
    code, library = build(tmp_path / 'recording.h5')
    assert code == 1 and [(task, success) for task, success, _ in contents(library)] == \
        [('fold-it', False), ('lift-the-cube', True)]
    assert '2 episodes added' in (out := capsys.readouterr().out)
    assert '1 skipped:\n  empty: episode empty has no observations' in out


def test_a_damaged_episode_of_a_recording_costs_that_episode(episodes, build, contents, tmp_path, capsys):
    path = tmp_path / 'recording.h5'
    write_recording(path, [RecordedEpisode(name, True, episodes[0][::4]) for name in ('one', 'two', 'three')])
    with h5py.File(path, 'r+') as file:
        del file['episodes/00000/calls/00001/state']
        del file['episodes/00001'].attrs['name']
    code, library = build(path)
    assert code == 1 and len(contents(library)) == 1
    assert '1 episodes added' in (out := capsys.readouterr().out) and '2 skipped' in out and 'episode 00001: ' in out


def test_episodes_of_a_recording_are_read_one_at_a_time(episodes, tmp_path, monkeypatch):
    path, read = tmp_path / 'recording.h5', []
    write_recording(path, [RecordedEpisode(name, True, episodes[0][::4]) for name in ('one', 'two')])
    method = Recording.read
    monkeypatch.setattr(Recording, 'read', lambda self, key: (read.append(key), method(self, key))[1])
    with open_source(path, Wanted(CAMERAS, JOINTS, 4), SourceOptions()) as source:
        pending = list(source)  # as those do who split it into references and tests
        assert read == [] and [(p.name, p.prompt) for p in pending] == [(n, PROMPT) for n in ('one', 'two')]
        assert source.cameras == CAMERAS
        assert [len(p.read().observations) for p in reversed(pending)] == [5, 5] and len(read) == 2


def test_an_observation_that_does_not_fit_costs_its_episode_alone(open_policy, look, tmp_path):
    policy = open_policy(Settings(mode='dense'), tmp_path / 'library')
    odd = look(1)
    odd.state[2] = float('nan')

    def unreadable():
        raise EpisodeError('gone')

    source = [PendingEpisode('good', PROMPT, lambda: RecordedEpisode('good', True, [look(1), look(2)])),
              PendingEpisode('odd', PROMPT, lambda: RecordedEpisode('odd', True, [look(1), odd])),
              PendingEpisode('unreadable', PROMPT, unreadable),
              PendingEpisode('good', PROMPT, unreadable),  # there already: not even read
              PendingEpisode('fine', PROMPT, lambda: RecordedEpisode('fine', True, [look(3)]))]
    seen = []
    report = build_library(policy, source, lambda pending: seen.append(pending.name))
    assert (report.added, report.present) == (2, 1) and seen == ['good', 'odd', 'unreadable', 'good', 'fine']
    assert [name for name, _ in report.skipped] == ['odd', 'unreadable']
    assert 'dimension 2 is nan' in report.skipped[0][1]
    assert [stored.episode for stored in policy.library.episodes] == ['fine', 'good']


def test_a_library_that_cannot_be_written_ends_the_build(open_policy, look, tmp_path):
    policy = open_policy(Settings(mode='dense'), tmp_path / 'library')
    (tmp_path / 'library/lift-the-cube').write_text('a file where a folder has to be')
    source = [PendingEpisode('good', PROMPT, lambda: RecordedEpisode('good', True, [look(1)]))]
    with pytest.raises(LibraryError, match='could not be written'):
        build_library(policy, source)


@pytest.mark.parametrize(('text', 'name'), [('pick up', 'pick-up'), ('../x', 'x'), ('a' * 300, 'a' * 100),
                                            ('ü.1', '1')])
def test_names_become_file_names(text, name):
    assert file_name(text) == name


def test_a_name_without_letters_is_refused():
    with pytest.raises(EpisodeError, match='no file name'):
        file_name('...')


@pytest.mark.parametrize(('module', 'package', 'extra'), [
    ('lerobot', 'pyarrow', 'lerobot'), ('lerobot', 'av', 'lerobot'), ('bag', 'rosbags', 'bags')])
def test_a_missing_package_is_one_sentence_with_the_pip_line(build, episodes, tmp_path, capsys, monkeypatch, module,
                                                             package, extra):
    (tmp_path / 'source/meta').mkdir(parents=True)
    (tmp_path / ('source/meta/info.json' if module == 'lerobot' else 'source/metadata.yaml')).touch()
    for name in [name for name in sys.modules if name.startswith('rmuscle_core.importing.') or
                 name.partition('.')[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert build(tmp_path / 'source')[0] == 2
    assert f"pip install 'rmuscle[{extra}]'" in capsys.readouterr().err
