# SPDX-License-Identifier: Apache-2.0
"""Saving an episode to a disk that does not answer stalls no call; the capacity and the use reach the library."""

import os
import threading
from dataclasses import replace

import pytest
import torch

from rmuscle_core.errors import LibraryError
from rmuscle_core.library.usage import last_used_ns
from rmuscle_core.settings import Settings

PROMPT, WAIT_S = 'lift the cube', 60.0  # as in tiny_policy.py; the limit is never waited for when the code is right
SETTINGS = Settings(min_similarity=0.0, action_similarity=0.0)


@pytest.fixture
def slow_disk(monkeypatch):
    """(reached, answer): fsync reports that it was reached and returns when it is told to."""
    reached, answer, real = threading.Event(), threading.Event(), os.fsync

    def fsync(descriptor):
        reached.set()
        assert answer.wait(WAIT_S)
        real(descriptor)

    monkeypatch.setattr(os, 'fsync', fsync)
    yield reached, answer
    answer.set()


def call(policy, observation, seconds=float('inf')):
    chunk = policy.infer(observation)
    policy.chunk_published(seconds)
    return chunk


def test_calls_go_on_while_the_disk_does_not_answer(open_policy, look, tmp_path, slow_disk):
    reached, answer = slow_disk
    answer.set()
    policy = open_policy(SETTINGS, tmp_path / 'library')
    call(policy, look(place=0))
    answer.clear()
    reached.clear()
    saved = policy.save_episode(True)
    assert reached.wait(WAIT_S)
    for place in range(3):  # each returns; a call that waited for the disk would wait for ever
        assert call(policy, look(place=place)).actions.shape == (8, 5)
    policy.reset_episode(PROMPT)
    assert policy.status()['library_entries'] == 0 and not saved.done()
    call(policy, look(place=1))
    answer.set()
    assert saved.result(WAIT_S).is_file() and policy.status()['library_entries'] == 1


def test_the_capacity_of_the_settings_is_kept_when_an_episode_is_saved(open_policy, look, tmp_path):
    policy = open_policy(SETTINGS, tmp_path / 'library')
    call(policy, look(place=0))
    long = replace(policy.memory.episode[0], prefix=torch.zeros(40_000, 32, dtype=torch.bfloat16), neurons=None)
    big = policy.library.add_episode('lift-the-cube', [long], True, 'big')
    first = policy.save_episode(False).result(WAIT_S)
    assert first.exists() and big.exists()  # 0 MB keeps everything
    policy.settings = SETTINGS.with_values(library_capacity=1)
    policy.reset_episode(PROMPT)
    call(policy, look(place=1))
    second = policy.save_episode(True).result(WAIT_S)
    assert [e.path for e in policy.library.episodes] == [second] and not big.exists() and not first.exists()
    policy.reset_episode(PROMPT)
    assert policy.wait_ready(WAIT_S)
    assert call(policy, look(place=1)).report.reference.startswith(f'lift-the-cube/{second.stem}#')


def test_serving_a_call_counts_as_use(open_policy, look, tmp_path):
    recorder = open_policy(SETTINGS, tmp_path / 'library')
    call(recorder, look(place=0))
    path = recorder.save_episode(True).result(WAIT_S)
    os.utime(path, (1000, 1000))
    policy = open_policy(SETTINGS, tmp_path / 'library')
    assert call(policy, look(place=0)).report.path == 'library'
    assert policy.wait_ready(WAIT_S)
    policy.library.evict(10**12)  # one of the places where use reaches the disk
    assert last_used_ns(policy.library.episodes[0]) > 10**9 * 1000


def test_a_library_recorded_with_another_joint_order_is_refused(open_policy, tmp_path):
    open_policy(SETTINGS, tmp_path / 'library', joints=('a', 'b', 'c', 'd', 'e'))
    with pytest.raises(LibraryError, match='another joints'):
        open_policy(SETTINGS, tmp_path / 'library', joints=('b', 'a', 'c', 'd', 'e'), need_library=True)
