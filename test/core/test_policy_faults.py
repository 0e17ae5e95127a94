# SPDX-License-Identifier: Apache-2.0
"""A policy whose device runs out of memory or breaks, and whose references are poisoned."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_policy import PROMPT, WAIT_S, run

import rmuscle_core.policy
from rmuscle_core.errors import DeviceError, LibraryError, RMuscleError, SettingsError
from rmuscle_core.library import EpisodeLibrary
from rmuscle_core.policy import MusclePolicy
from rmuscle_core.settings import Settings

OPEN = Settings().with_values(token_ratio=0.5, neuron_ratio=0.5, min_similarity=0.0, action_similarity=0.0,
                              slots=4)
DENSE = OPEN.with_values(mode='dense')
NO_MEMORY = [torch.OutOfMemoryError('CUDA out of memory'),
             RuntimeError('NVML_SUCCESS == r INTERNAL ASSERT FAILED at "CUDACachingAllocator.cpp":1128')]
no_memory = pytest.mark.parametrize('error', NO_MEMORY, ids=['oom', 'nvml'])


@pytest.fixture
def load(open_policy):
    """load(settings, library, ...): as open_policy."""
    return lambda settings=OPEN, library=None, **options: open_policy(settings, library, **options)


def failing(method, error, when=lambda *args: True, times=1):
    """``method``, but the first ``times`` calls that ``when`` picks raise ``error``."""
    left = [times]

    def call(*args, **options):
        if left[0] and when(*args):
            left[0] -= 1
            raise error
        return method(*args, **options)
    return call


def cached(embedded, plan, slot, donors=()):
    return slot is not None


@no_memory
def test_v31_memory_that_runs_out_in_a_call_halves_the_window_and_the_chunk_is_out(load, look, library, monkeypatch,
                                                                                   error):
    policy = load(library=library)
    dense, = run(load(DENSE), [look(2, 0)])
    monkeypatch.setattr(policy.engine, 'act', failing(policy.engine.act, error, cached))
    chunk, = run(policy, [look(2, 0)])
    assert np.array_equal(chunk.actions, dense.actions)
    assert chunk.report.path == 'dense' and 'memory ran out' in chunk.report.reason
    status = policy.status()
    assert (status['out_of_memory'], status['slots'], policy.engine.arena.slots) == (1, 2, 2)
    assert len(policy.problems) == 1 and '2 of 4 reference slots' in policy.problems[0]
    assert run(policy, [look(2, 1)])[0].report.path == 'library'  # and goes on with what is left


@no_memory
def test_v31_memory_that_runs_out_in_an_expansion_halves_the_window_too(load, look, library, monkeypatch, error):
    policy = load(DENSE, library)
    monkeypatch.setattr(policy.engine, 'expand', failing(policy.engine.expand, error))
    policy.settings = OPEN
    chunks = run(policy, [look(2, 0), look(2, 1), look(2, 2)])
    assert [c.report.path for c in chunks] == ['dense', 'dense', 'library']
    assert policy.status()['out_of_memory'] == 1 and policy.status()['slots'] == 2
    assert policy.status()['quarantined'] == 0 and len(policy.problems) == 1


def test_v31_a_window_of_none_runs_dense(load, look, library, monkeypatch):
    policy = load(OPEN.with_values(slots=1), library)
    monkeypatch.setattr(policy.engine, 'act', failing(policy.engine.act, NO_MEMORY[0], cached))
    chunks = run(policy, [look(2, place) for place in range(3)])
    assert [c.report.path for c in chunks] == ['dense'] * 3 and policy.status()['slots'] == 0
    policy.reset_episode(PROMPT)
    assert policy.wait_ready(WAIT_S) and run(policy, [look(2, 0)])[0].report.path == 'dense'
    assert policy.save_episode(True).result(WAIT_S).is_file()


@pytest.mark.parametrize('stage', ['embed', 'act'])
def test_v31_a_dense_call_is_tried_once_more_and_then_refused(load, look, library, monkeypatch, stage):
    policy = load(DENSE, library)
    method = getattr(policy.engine, stage)
    monkeypatch.setattr(policy.engine, stage, failing(method, NO_MEMORY[0]))
    assert run(policy, [look(2, 0)])[0].report.path == 'dense'
    monkeypatch.setattr(policy.engine, stage, failing(method, NO_MEMORY[0], times=2))
    with pytest.raises(RMuscleError, match='no memory for a dense call'):
        policy.infer(look(2, 1))
    assert policy.status()['slots'] == 1
    assert policy.infer(look(2, 1)).report.path == 'dense'


@no_memory
def test_v31_memory_that_runs_out_while_the_next_call_is_prepared_halves_the_window(load, look, library, monkeypatch,
                                                                                    error):
    policy = load(library=library)
    monkeypatch.setattr(policy.engine, 'prepare', failing(policy.engine.prepare, error))
    chunks = run(policy, [look(2, place) for place in range(3)])
    assert policy.status()['slots'] == 2 and np.isfinite([chunk.actions for chunk in chunks]).all()


def test_memory_that_runs_out_while_saving_is_one_sentence_and_saving_again_works(load, look, tmp_path, monkeypatch):
    policy = load(DENSE, library=tmp_path / 'new')
    run(policy, [look(1, 0)])
    monkeypatch.setattr(policy.engine, 'rank_neurons', failing(policy.engine.rank_neurons, NO_MEMORY[0]))
    with pytest.raises(LibraryError, match='save it again'):
        policy.save_episode(True).result(WAIT_S)
    run(policy, [look(1, 1)])
    assert policy.status()['slots'] == 2 and policy.save_episode(True).result(WAIT_S).is_file()


@no_memory
def test_v31_weights_that_do_not_fit_are_refused_in_one_sentence(tiny_checkpoint, monkeypatch, error):
    monkeypatch.setattr(rmuscle_core.policy, 'load_model', failing(None, error))
    with pytest.raises(SettingsError, match='no memory for the weights of'):
        MusclePolicy.load(tiny_checkpoint)


LOST = RuntimeError('CUDA error: an illegal memory access was encountered')


def test_a_lost_device_is_never_taken_for_a_poisoned_reference(load, look, library, monkeypatch):
    policy = load(library=library)
    monkeypatch.setattr(policy.engine, 'act', failing(policy.engine.act, LOST))
    with pytest.raises(DeviceError, match='illegal memory access'):
        policy.infer(look(2, 0))
    assert policy.status()['quarantined'] == policy.status()['out_of_memory'] == 0


def test_a_device_lost_in_an_expansion_ends_the_calls(load, look, library, monkeypatch):
    policy = load(DENSE, library)
    monkeypatch.setattr(policy.engine, 'expand', failing(policy.engine.expand, LOST))
    policy.settings = OPEN
    run(policy, [look(2, 0)])
    assert any('illegal memory access' in problem for problem in policy.problems)
    for _ in range(2):
        with pytest.raises(DeviceError, match='start the process again'):
            policy.infer(look(2, 1))
    assert policy.status()['quarantined'] == 0


def test_v19_a_poisoned_reference_costs_one_dense_call_and_is_not_used_again(load, look, library):
    policy = load(library=library)
    dense, = run(load(DENSE), [look(9, 0)])
    policy.engine.arena.y.fill_(float('nan'))
    chunk = policy.infer(look(9, 0))
    assert np.array_equal(chunk.actions, dense.actions)
    assert chunk.report.path == 'dense' and 'non-finite' in chunk.report.reason
    assert policy.status()['quarantined'] == 1 and '#0 is out of use' in policy.problems[0]
    policy.chunk_published(float('inf'))
    assert policy.wait_ready(WAIT_S)
    policy.reset_episode(PROMPT)
    assert policy.wait_ready(WAIT_S)
    assert not policy.infer(look(9, 0)).report.reference.endswith('#0')


def test_v19_what_is_not_finite_without_the_reference_either_is_not_its_fault(load, look, library, monkeypatch):
    policy, act = load(library=library), None
    act = policy.engine.act
    monkeypatch.setattr(policy.engine, 'act', lambda *args: (act(*args)[0] * float('nan'), {}))
    chunk = policy.infer(look(9, 0))
    assert np.isnan(chunk.actions).any() and chunk.report.path == 'dense'
    assert policy.status()['quarantined'] == 0 and policy.problems == []


def poisoned(reference, how):
    if how == 'NaN':
        prefix = reference.prefix.clone()
        prefix[1, 2] = float('nan')
        return replace(reference, prefix=prefix)
    if how == 'Inf':
        return replace(reference, prefix=reference.prefix * float('inf'))
    if how == 'rows':
        return replace(reference, prefix=reference.prefix[:-2])  # which the views could still share
    if how == 'prompt':
        return replace(reference, token_ids=np.tile(reference.token_ids, 50))
    neurons = reference.neurons.copy()
    neurons[0, 0, 1] = neurons[0, 0, 0]
    return replace(reference, neurons=neurons)


@pytest.mark.parametrize(('how', 'word'), [('NaN', 'finite'), ('Inf', 'finite'), ('rows', 'visual tokens'),
                                           ('prompt', 'prompt'), ('twice', 'twice')])
def test_what_can_be_seen_of_a_poisoned_reference_is_seen_before_it_is_expanded(load, look, library, monkeypatch, how,
                                                                                word):
    stored = EpisodeLibrary.open(library, set_aside=False)
    references = [stored.load(identity) for identity in stored.index().ids]
    next(library.rglob('*.h5')).unlink()
    stored.add_episode(references[0].id.task, [poisoned(references[0], how), *references[1:]], True, 'bad')
    policy, expanded = load(DENSE, library), []
    expand = policy.engine.expand
    monkeypatch.setattr(policy.engine, 'expand', lambda reference, *rest: (expanded.append(str(reference.id)),
                                                                           expand(reference, *rest)))
    policy.settings = OPEN
    policy.reset_episode(PROMPT)
    assert policy.wait_ready(WAIT_S)
    chunks = run(policy, [look(3, place) for place in range(3)])
    assert [c.report.path for c in chunks][1:] == ['library'] * 2
    assert f'{references[0].id.task}/bad#1' in expanded and f'{references[0].id.task}/bad#0' not in expanded
    problem, = policy.problems
    assert policy.status()['quarantined'] == 1 and word in problem and '#0 is out of use' in problem


def test_many_poisoned_references_are_not_reported_one_by_one(load, library):
    policy = load(library=library)
    identity = policy.library.index().ids[0]
    for call in range(30):
        policy.memory.quarantine(identity._replace(call=call), 'a test says so')
    assert len(policy.problems) == 9 and '22 more' in policy.problems[-1]


def test_a_recorded_episode_may_have_any_name(load, look, library):
    policy = load(library=library)
    references = [policy.library.load(identity) for identity in policy.library.index().ids]
    next(library.rglob('*.h5')).unlink()
    policy.library.add_episode(references[0].id.task, references, True, 'running-1')
    policy: MusclePolicy = load(library=library)
    assert [c.report.path for c in run(policy, [look(3, 0), look(3, 1)])] == ['library'] * 2
