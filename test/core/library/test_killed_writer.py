# SPDX-License-Identifier: Apache-2.0
"""A writer killed at any moment leaves whole episodes only, and the next writer cleans up."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from rmuscle_core.library import EpisodeLibrary
from rmuscle_core.library.episode import verify_episode

WRITER = """
import sys
sys.path.insert(0, sys.argv[2])
import conftest
from rmuscle_core.library import EpisodeLibrary
library = EpisodeLibrary.open(sys.argv[1], conftest.FINGERPRINT)
tell = lambda stage: print(stage, flush=True)
for number in range(100):
    tell('begin')
    library.add_episode('stack', conftest.references(6, seed=number), True, f'e{number:03d}', on_stage=tell)
"""
STAGES = ['begin', *(f'call {i}' for i in range(6)), 'closed', 'verified', 'visible']


@pytest.mark.parametrize('seed', range(6))
def test_killed_while_writing(tmp_path, shelf, seed):
    path = tmp_path / 'library'
    EpisodeLibrary.create(path, shelf.fingerprint)
    # the writer goes on while it is killed, so the moment is near a stage and not only at it
    last = random.Random(seed).randrange(len(STAGES), 3 * len(STAGES))
    writer = subprocess.Popen([sys.executable, '-c', WRITER, str(path), str(Path(__file__).parent)],
                              stdout=subprocess.PIPE, text=True)
    told = [writer.stdout.readline().strip() for _ in range(last + 1)]
    writer.kill()
    told += writer.stdout.read().split('\n')
    writer.wait()
    visible, begun = told.count('visible'), told.count('begin')
    library = EpisodeLibrary.open(path, shelf.fingerprint)
    assert library.problems == [] and visible <= len(library.episodes) <= begun
    for number, episode in enumerate(library.episodes):
        assert len(verify_episode(episode.path).calls) == 6
        for call, reference in enumerate(shelf.references(6, seed=number)):
            assert shelf.same(library.load(episode.id(call)), reference)
    library.add_episode('stack', shelf.references(), True, 'after')
    assert list(path.glob('*/.*')) == []
