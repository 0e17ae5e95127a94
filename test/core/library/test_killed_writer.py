# SPDX-License-Identifier: Apache-2.0
"""V29: a writer killed at any moment leaves whole episodes only, and what it did not finish is cleaned up.

The long run is ``bench/kill_writers.py``; this is the same at 20 seeded moments.
"""

import importlib
import random
from pathlib import Path

import pytest

from rmuscle_core.library import EpisodeLibrary

BENCH = Path(__file__).parents[3] / 'bench'


@pytest.fixture(scope='module')
def kills():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCH)
        module = importlib.import_module('kill_writers')
        yield module, module.warm_server()


@pytest.mark.parametrize('seed', range(20))
def test_v29_killed_while_recording(tmp_path, kills, seed):
    module, context = kills
    path = tmp_path / 'library'
    kept = EpisodeLibrary.create(path, module.FINGERPRINT).add_episode('stack', module.recording(7), True, 'kept')
    before = kept.read_bytes()
    # the writer goes on while it is killed, so the moment is near a stage and not only at it
    stages = random.Random(seed).randrange(1, 3 * len(module.STAGES))
    outcome = module.kill_once(context, path, 'killed', stages)
    assert outcome.good, outcome
    assert kept.read_bytes() == before
    EpisodeLibrary.open(path).add_episode('stack', module.recording(8), True, 'after')


def test_v29_the_check_would_notice_a_lost_or_a_broken_episode(tmp_path, kills):
    module, _ = kills
    assert not module.Outcome('visible', done=2, begun=2, kept=1, unfinished=0, problems=[]).good
    library = EpisodeLibrary.create(tmp_path / 'library', module.FINGERPRINT)
    path = library.add_episode('stack', module.recording(0), True, 'one')
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert len(module._damage(library)) == 1
