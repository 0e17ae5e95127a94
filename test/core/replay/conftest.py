# SPDX-License-Identifier: Apache-2.0
"""A recording that the tiny policy can replay."""

from __future__ import annotations

import pytest

from rmuscle_core.library.recording import RecordedEpisode, write_recording

NAMES = ('a', 'b', 'c', 'd', 'e')


@pytest.fixture(scope='session')
def record(look):
    """record(folder): a file of four executions that look alike, and a fifth without an observation."""
    def make(folder):
        episodes = [RecordedEpisode(f'run-{n}', True, [look(seed=10 * n + i, place=i) for i in range(3)])
                    for n in range(4)]
        write_recording(folder / 'recording.h5', [*episodes, RecordedEpisode('empty', True, [])], NAMES)
        return folder / 'recording.h5'
    return make


@pytest.fixture
def recording(record, tmp_path):
    return record(tmp_path)
