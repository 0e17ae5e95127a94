# SPDX-License-Identifier: Apache-2.0
"""Replay, tuning and characterisation read every source that a library is built from, with equal results."""

import json

import pytest
from recorded_sources import messages_of, write_bag, write_dataset
from rosbags.rosbag2 import StoragePlugin

from rmuscle_core.cli import main
from rmuscle_core.library.recording import RecordedEpisode, write_recording

FPS, STEPS, NAMES = 20, 4, tuple(f'joint{number}' for number in range(5))
STORAGE = {'mcap': StoragePlugin.MCAP, 'sqlite3': StoragePlugin.SQLITE3}


@pytest.fixture
def written(episodes, parameters, tmp_path):
    """written(kind): three executions, the third as the first, in that form; and the options that it needs."""
    chosen = [episodes[0], episodes[1], episodes[0]]

    def write(kind):
        if kind == 'recording':
            recorded = [RecordedEpisode(f'episode-{n:03d}', True, e[::STEPS]) for n, e in enumerate(chosen)]
            write_recording(tmp_path / 'recording.h5', recorded, NAMES)
            return tmp_path / 'recording.h5', []
        if kind == 'dataset':
            return write_dataset(tmp_path / kind, chosen, FPS), []
        (tmp_path / kind).mkdir()
        for number, episode in enumerate(chosen):
            write_bag(tmp_path / kind / f'episode-{number:03d}', messages_of(episode, NAMES), STORAGE[kind])
        return tmp_path / kind, ['--parameters', str(parameters)]
    return write


@pytest.mark.parametrize(('command', 'kinds', 'file'), [
    ('replay', ('recording', 'mcap', 'sqlite3'), 'report.json'),
    ('characterize', ('recording', 'sqlite3', 'dataset'), 'characterization.json')])
def test_every_source_gives_the_same_numbers(written, tiny_checkpoint, tmp_path, command, kinds, file):
    found = []
    for kind in kinds:
        path, options = written(kind)
        out = tmp_path / f'{kind}-found'
        given = [str(path)] if command == 'replay' else ['--episodes', str(path)]
        assert main([command, *given, '--checkpoint', str(tiny_checkpoint), '--out', str(out), *options]) == 0
        found.append(json.loads((out / file).read_text()))
    assert any((tmp_path / 'sqlite3').rglob('*.db3')) and found[0]['calls'] > 0
    assert measured(found[0]) == measured(found[1]) == measured(found[2])


def measured(found):
    """What does not depend on where the episodes were and how fast this machine is."""
    if 'matched' in found:
        return found['matched'], found['same_number'], found['path_cosine']
    return [(call['call'], call['path'], call['similarity'], call['difference']) for call in found['by_call']]
