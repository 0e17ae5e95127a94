# SPDX-License-Identifier: Apache-2.0
"""``rmuscle bench --retrieval``: what looking up a reference costs on the host, with the policy's own retriever."""

from __future__ import annotations

import time

import numpy as np

from rmuscle_core.library import LibraryIndex, ReferenceId
from rmuscle_core.retrieval import Retriever
from rmuscle_core.settings import Settings
from rmuscle_core.working_set import WorkingSet

TASK, VIEWS = 'task', ('top', 'left_wrist', 'right_wrist')


def random_index(entries: int, episodes: int, state_dim: int, settings: Settings, key_width: int = 256,
                 seed: int = 0) -> LibraryIndex:
    """Keys and state histories of a library of one task, calls spread evenly over the episodes."""
    random = np.random.default_rng(seed)
    calls = -(-entries // episodes)
    ids = tuple(ReferenceId(TASK, f'episode-{n // calls:04d}', n % calls) for n in range(entries))
    keys = random.standard_normal((entries, len(VIEWS), key_width), np.float32)
    states = random.standard_normal((entries, settings.history, state_dim), np.float32)
    for n, identity in enumerate(ids):
        states[n, :max(settings.history - 1 - identity.call, 0)] = np.nan  # the episode was too young for a history
    return LibraryIndex(ids, (VIEWS,) * entries, keys, states)


def measure_retrieval(entries: int = 800, episodes: int = 32, state_dim: int = 14,
                      repeats: int = 300) -> dict[str, list[float]]:
    """Microseconds, ``repeats`` samples each, of what a policy call does about references besides model work.

    match: the best of the ready references and pinning its slot, before prefill. plan: what the whole library offers
    for the next call, by the state foretold, after the chunk is published. total: both.
    """
    settings = Settings()
    index = random_index(entries, episodes, state_dim, settings)
    retriever, working_set = Retriever(index, settings), WorkingSet(settings.slots)
    for identity in index.ids[:settings.slots]:
        slot = working_set.claim(identity, index.ids)
        working_set.commit(slot, None)
    random = np.random.default_rng(1)
    samples: dict[str, list[float]] = {'match': [], 'plan': [], 'total': []}
    for _ in range(repeats):
        row = random.integers(len(index.ids))
        key = index.keys[row] + 0.1 * random.standard_normal(index.keys[row].shape, np.float32)
        states = np.nan_to_num(index.states[row])
        start = time.perf_counter()
        match = retriever.match(key, states, working_set.ready(), TASK, VIEWS)
        with working_set.reading(match.id if match else None):
            middle = time.perf_counter()
        retriever.ahead(key, states, states[-1], TASK, VIEWS)
        end = time.perf_counter()
        for name, seconds in (('match', middle - start), ('plan', end - middle), ('total', end - start)):
            samples[name].append(1e6 * seconds)
    return samples
