# SPDX-License-Identifier: Apache-2.0
"""V21: nothing that decides over a call has a unit. A robot in degrees is served as the same robot in radians."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest
from tiny_policy import PROMPT, WAIT_S, run, write_statistics

from rmuscle_core.policy import task_of
from rmuscle_core.settings import Settings

DEGREES = 57.29578
SETTINGS = Settings(slots=6).with_values(token_ratio=0.5, neuron_ratio=0.5)


@pytest.mark.parametrize('factor', [DEGREES, 1 / DEGREES])
def test_v21_scaled_states_pick_the_same_references(open_policy, look, tiny_checkpoint, tmp_path, factor):
    scaled = shutil.copytree(tiny_checkpoint, tmp_path / 'scaled')
    write_statistics(scaled, factor)
    served = []
    for checkpoint, unit in ((tiny_checkpoint, 1.0), (scaled, factor)):
        def seen(seed, place, unit=unit):
            observation = look(seed, place)
            return replace(observation, state=(observation.state * np.float32(unit)).astype(np.float32))

        library = tmp_path / f'library-{unit:.3f}'
        policy = open_policy(SETTINGS, library, checkpoint)
        for episode in range(2):
            references = policy.record_references([seen(10 * episode + i, i + 3 * episode) for i in range(3)],
                                                  task_of(PROMPT), f'episode-{episode}')
            policy.library.add_episode(task_of(PROMPT), references, True, f'episode-{episode}')
        policy.memory.retriever.use(policy.library.index())
        policy.reset_episode(PROMPT)
        assert policy.wait_ready(WAIT_S)
        chunks = run(policy, [seen(50 + place, place) for place in (0, 1, 2, 5)])
        served.append([(c.report.path, c.report.reference, c.report.tokens_recomputed, c.report.neurons_evaluated,
                        round(c.report.similarity, 3)) for c in chunks])
    assert served[0] == served[1]
    assert [path for path, *_ in served[0]].count('library') >= 3


def test_v21_standing_still_is_no_reason_not_to_be_called(open_policy, look):
    policy = open_policy(SETTINGS)
    chunks = run(policy, [look(1)] * 4)
    assert len(chunks) == 4 and sum(policy.served.values()) == 4
