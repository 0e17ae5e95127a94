# SPDX-License-Identifier: Apache-2.0
"""Whatever bytes of a dataset or a bag are damaged, it is read or refused: nothing else is raised."""

from __future__ import annotations

import shutil
from contextlib import suppress

import numpy as np
import pytest
from recorded_sources import messages_of, write_bag, write_dataset
from rosbags.rosbag2 import StoragePlugin
from tiny_policy import CAMERAS, JOINTS

from rmuscle_core.errors import EpisodeError, RMuscleError
from rmuscle_core.importing.episodes import Wanted
from rmuscle_core.importing.sources import SourceOptions, open_source

NAMES = tuple(f'joint{number}' for number in range(JOINTS))
WRITERS = {
    'videos': lambda path, episodes: write_dataset(path, episodes, 20),
    'pictures in tables': lambda path, episodes: write_dataset(path, episodes, 20, 'image'),
    'mcap': lambda path, episodes: write_bag(path, messages_of(episodes[0], NAMES)),
    'sqlite3': lambda path, episodes: write_bag(path, messages_of(episodes[0], NAMES), StoragePlugin.SQLITE3),
}


def cut(content, random):
    return content[:random.integers(len(content))]


def flip(content, random):
    for at in random.integers(len(content), size=8):
        content[at] = random.integers(256)
    return content


def overwrite(content, random):
    at, size = random.integers(len(content)), random.integers(1, 400)
    return content[:at] + random.bytes(size) + content[at + size:]


def leave_out(content, random):
    at, size = random.integers(len(content)), random.integers(1, 400)
    return content[:at] + content[at + size:]


@pytest.mark.parametrize('kind', WRITERS)
def test_damaged_bytes(episodes, tmp_path, parameters, kind):
    whole, damaged = WRITERS[kind](tmp_path / 'whole', episodes[1:]), tmp_path / 'damaged'
    random = np.random.default_rng(0)
    outcomes = set()
    for trial in range(16):
        shutil.rmtree(damaged, ignore_errors=True)
        shutil.copytree(whole, damaged)
        files = sorted(path for path in damaged.rglob('*') if path.is_file())
        victim = files[random.integers(len(files))]
        victim.write_bytes((cut, flip, overwrite, leave_out)[trial % 4](bytearray(victim.read_bytes()), random))
        with suppress(RMuscleError):
            source = open_source(damaged, Wanted(CAMERAS, JOINTS, 4), SourceOptions(parameters=parameters))
            for pending in source:
                try:
                    pending.read()
                    outcomes.add('read')
                except EpisodeError:
                    outcomes.add('refused')
    assert 'refused' in outcomes
