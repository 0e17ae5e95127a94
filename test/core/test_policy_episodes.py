# SPDX-License-Identifier: Apache-2.0
"""MusclePolicy and its library: what is recorded, ranked, saved and found again."""

import json
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_policy import CAMERAS, OPEN, PROMPT, WAIT_S, run, write_checkpoint

from rmuscle_core import memory
from rmuscle_core.errors import LibraryError
from rmuscle_core.library import EpisodeLibrary
from rmuscle_core.policy import MusclePolicy, task_of


def test_a_library_of_another_checkpoint_is_reported_and_left_alone(load, look, library, tmp_path):
    other = write_checkpoint(tmp_path / 'other', seed=1)
    before = {path: path.read_bytes() for path in library.rglob('*') if path.is_file()}
    policy = load(library=library, checkpoint=other)
    assert policy.infer(look()).report.path == 'dense'
    assert len(policy.problems) == 1 and 'weights' in policy.problems[0] and str(library) in policy.problems[0]
    assert before == {path: path.read_bytes() for path in library.rglob('*') if path.is_file()}
    with pytest.raises(LibraryError, match='weights'):
        MusclePolicy.load(other, library=library, need_library=True)


def test_another_mask_layout_is_another_library(load, look, library):
    policy = load(OPEN.with_values(group_size=2), library)
    assert 'masks' in policy.problems[0] and policy.infer(look()).report.path == 'dense'


def test_a_damaged_episode_file_is_reported_and_calls_go_on(load, look, library):
    episode, = library.rglob('*.h5')
    opened = EpisodeLibrary.open(library, set_aside=False)
    prefix = opened.load(opened.index().ids[1]).prefix.view(torch.int16).numpy().tobytes()
    episode.write_bytes(episode.read_bytes().replace(prefix, bytes(len(prefix))))
    policy = load(library=library)
    chunks = run(policy, [look(3, place) for place in range(3)])
    assert len(chunks) == 3 and all(np.isfinite(c.actions).all() for c in chunks)
    assert any(episode.stem in problem for problem in policy.problems)
    assert policy.memory.retriever.candidates(None, task_of(PROMPT), CAMERAS) == []  # and is not asked for again


def test_a_reference_stored_without_ranking_is_ranked_when_it_is_expanded(load, look, library):
    policy = load(library=library)
    ranked = [policy.library.load(identity) for identity in policy.library.index().ids]
    episode, = library.rglob('*.h5')
    policy.library.add_episode(ranked[0].id.task, [replace(r, neurons=None) for r in ranked], True, 'bare')
    episode.unlink()
    report, = (c.report for c in run(load(library=library), [look(3, 0)]))
    assert report.path == 'library' and report.neurons_evaluated == report.neurons // 2


def test_saving_needs_a_library_and_calls(load, look, tmp_path):
    policy = load()
    run(policy, [look()])
    with pytest.raises(LibraryError, match='library'):
        policy.save_episode().result(WAIT_S)
    with pytest.raises(LibraryError, match='policy calls'):
        load(library=tmp_path / 'new').save_episode().result(WAIT_S)


def test_a_saved_episode_serves_the_next_one_at_once(load, look, tmp_path):
    policy = load(library=tmp_path / 'library')
    run(policy, [look(1, 0), look(1, 1)])
    assert policy.save_episode(True).result(WAIT_S).is_file()
    policy.reset_episode(PROMPT)
    assert policy.wait_ready(WAIT_S)
    assert [c.report.path for c in run(policy, [look(2, 0), look(2, 1)])] == ['library', 'library']


def test_nothing_is_expanded_while_an_episode_is_recorded(load, look, library, monkeypatch):
    policy, entered, busy = load(library=library), threading.Event(), []

    def expand(*arguments):
        entered.set()
        while True:
            arguments[-1]()  # until it is told to stop

    rank = policy.engine.rank_neurons
    monkeypatch.setattr(policy.engine, 'expand', expand)
    monkeypatch.setattr(policy.engine, 'rank_neurons',
                        lambda *arguments: (busy.append(policy.memory.reconstructor._busy), rank(*arguments))[1])
    policy.infer(look(5, 7))
    policy.chunk_published(float('inf'))
    assert entered.wait(WAIT_S)
    busy.clear()  # of the call just made
    policy.record_references([look(1, 0), look(1, 1)], task_of(PROMPT), 'episode')
    assert busy == [False, False]


def test_recorded_and_lived_episodes_give_the_same_references(load, look, tmp_path):
    observations = [look(1, place) for place in range(2)]
    lived = load(OPEN.with_values(mode='dense'), library=tmp_path / 'library')
    run(lived, observations)
    lived.save_episode(True).result(WAIT_S)
    recorded = load().record_references(observations, task_of(PROMPT), 'episode')
    for identity, expected in zip(lived.library.index().ids, recorded, strict=True):
        stored = lived.library.load(identity)
        assert torch.equal(stored.prefix, expected.prefix)
        for name in ('token_ids', 'states', 'key', 'neurons', 'chunk'):
            assert np.array_equal(getattr(stored, name), getattr(expected, name)), name


def test_status_counts_what_served(load, look, library):
    policy = load(library=library)
    run(policy, [look(1, 0), look(1, 1)])
    status = policy.status()
    assert status['served_library'] == 2 and status['library_entries'] == 3 and status['slots'] == OPEN.slots
    assert status['working_set_bytes'] == policy.engine.arena.nbytes > 0
    json.dumps(status)


@pytest.mark.parametrize('stored', [False, True])
def test_calls_are_kept_only_where_they_can_be_saved(load, look, tmp_path, stored):
    policy = load(library=tmp_path / 'library' if stored else None)
    reports = [c.report for c in run(policy, [look(1, place) for place in range(5)])]
    assert [r.path for r in reports] == ['dense'] + ['previous_call'] * 4
    assert [r.reference[-2:] for r in reports[1:]] == ['#0', '#1', '#2', '#3']
    assert len(policy.memory.episode) == (5 if stored else 1)


def test_an_episode_without_end_is_bounded_and_cannot_be_saved_without_its_beginning(load, look, tmp_path, monkeypatch):
    monkeypatch.setattr(memory, 'EPISODE_CALLS', 3)
    policy = load(library=tmp_path / 'library')
    reports = [c.report for c in run(policy, [look(1, place) for place in range(5)])]
    assert [r.path for r in reports[1:]] == ['previous_call'] * 4 and len(policy.memory.episode) == 2
    with pytest.raises(LibraryError, match='reset_episode'):
        policy.save_episode().result(WAIT_S)


@pytest.mark.parametrize('residual', ['none', 'reference'])
def test_neurons_are_ranked_only_where_the_action_cache_is_used(load, look, monkeypatch, residual):
    policy, ranked = load(OPEN.with_values(mode='context', residual=residual)), []
    rank = policy.engine.rank_neurons
    monkeypatch.setattr(policy.engine, 'rank_neurons', lambda *args: (ranked.append(args[0].id.call), rank(*args))[1])
    run(policy, [look(1, 0), look(1, 1)])
    assert ranked == []
    policy.settings = OPEN.with_values(residual=residual)
    reports = [c.report for c in run(policy, [look(1, 2), look(1, 3)])]
    assert reports[0].neurons_evaluated == reports[0].neurons and 'until its' in reports[0].reason
    assert reports[1].neurons_evaluated < reports[1].neurons and ranked[-1] == 3
