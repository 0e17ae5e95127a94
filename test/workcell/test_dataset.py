# SPDX-License-Identifier: Apache-2.0
"""The demonstration file."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from rmuscle_core.errors import RMuscleError
from rmuscle_core.workcell import dataset


def test_round_trip_is_lossless(tmp_path, demonstrations, monkeypatch):
    monkeypatch.setattr(dataset, '_BLOCK', 20)  # several blocks, of unequal size
    path = tmp_path / 'demos.npz'
    assert dataset.write(path, demonstrations) == path.stat().st_size
    again = dataset.read(path)
    for field in fields(again):
        expected, found = getattr(demonstrations, field.name), getattr(again, field.name)
        assert found.dtype == expected.dtype and np.array_equal(found, expected), field.name
    assert [entry.name for entry in tmp_path.iterdir()] == ['demos.npz']


def test_repetitive_pictures_pack_well(tmp_path, demonstrations):
    still = dataset.Demonstrations(**{
        field.name: getattr(demonstrations, field.name) for field in fields(demonstrations)} | {
        'images': np.repeat(demonstrations.images[:1], 64, axis=0)})
    assert dataset.write(tmp_path / 'still.npz', still) < dataset.write(tmp_path / 'all.npz', demonstrations) - 100_000


def test_a_chunk_holds_the_last_command_past_the_end_of_the_plan(demonstrations):
    chunks = demonstrations.chunks(10)
    assert chunks.shape == (64, 10, 14)
    assert np.array_equal(chunks[5], demonstrations.commands[1, 6:16])
    late = chunks[7]  # step 18 of 24
    assert np.array_equal(late[:6], demonstrations.commands[1, 18:])
    assert (late[6:] == demonstrations.commands[1, -1]).all()


@pytest.mark.parametrize('damage', ['missing', 'text', 'truncated', 'flipped'])
def test_an_unreadable_file_is_refused_by_name(tmp_path, demonstrations, damage):
    path = tmp_path / 'demos.npz'
    if damage != 'missing':
        dataset.write(path, demonstrations)
        content = bytearray(path.read_bytes())
        if damage == 'flipped':
            content[len(content) // 3] ^= 0xFF
        path.write_bytes({'text': b'hello', 'truncated': content[:len(content) // 2]}.get(damage, bytes(content)))
    with pytest.raises(RMuscleError, match=r'demos\.npz is not a readable demonstration file'):
        dataset.read(path)


def test_a_file_of_before_there_were_landmarks_is_still_read(tmp_path, demonstrations):
    path = tmp_path / 'demos.npz'
    dataset.write(path, demonstrations)
    with np.load(path) as file:
        arrays = dict(file)
    for name in ('landmarks', 'located_landmarks'):
        places = arrays.pop(name)
        arrays[name.replace('landmarks', 'cubes')] = np.column_stack([places, np.full(len(places), 0.02, np.float32)])
    np.savez(path, **arrays)
    again = dataset.read(path)
    assert np.array_equal(again.landmarks, demonstrations.landmarks)
    assert np.array_equal(again.located_landmarks, demonstrations.located_landmarks)


def test_views_are_chosen_by_name(demonstrations):
    chosen = demonstrations.seen_by(['right_wrist', 'top'])
    assert chosen.cameras.tolist() == ['right_wrist', 'top']
    assert np.array_equal(chosen.images, demonstrations.images[:, [2, 0]])
    assert np.array_equal(chosen.located_images, demonstrations.located_images[:, [2, 0]])
    with pytest.raises(RMuscleError, match="no camera 'nose'; recorded are top"):
        demonstrations.seen_by(['nose'])


def test_recordings_of_one_cell_are_joined(demonstrations):
    both = dataset.join([demonstrations, demonstrations])
    assert len(both.images) == 128 and len(both.commands) == 32 and both.episodes.dtype == np.int32
    assert np.array_equal(both.chunks(10), np.concatenate([demonstrations.chunks(10)] * 2))
    assert len(np.unique(both.episodes)) == 32
    other = replace(demonstrations, task=np.array('another'))
    with pytest.raises(RMuscleError, match="task is 'transfer cube' in the first file, 'another' in another"):
        dataset.join([demonstrations, other])
