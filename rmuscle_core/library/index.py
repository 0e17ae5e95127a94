# SPDX-License-Identifier: Apache-2.0
"""What retrieval compares, in memory and in a file from which a large library opens quickly."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from rmuscle_core.library.durable import appearing
from rmuscle_core.library.episode import read_header
from rmuscle_core.library.reference import ReferenceId

log = logging.getLogger(__name__)

CACHE, _VERSION = '.index.npz', 1


@dataclass(frozen=True)
class StoredEpisode:
    """An episode file that can be used; views, keys [V,C] and states [h,S] per call. changed_ns: its time on disk."""

    path: Path
    task: str
    episode: str
    success: bool
    views: list[tuple[str, ...]]
    keys: Sequence[np.ndarray]
    states: Sequence[np.ndarray]
    nbytes: int
    changed_ns: int
    fingerprint: Mapping[str, str]

    @property
    def widths(self) -> set[tuple[int, int]]:
        """(C, S) of every call; a usable episode has one."""
        return {(key.shape[1], states.shape[1]) for key, states in zip(self.keys, self.states, strict=True)}

    def id(self, call: int) -> ReferenceId:
        return ReferenceId(self.task, self.episode, call)


@dataclass(frozen=True)
class LibraryIndex:
    """One row per reference.

    views: camera names per row. keys: float32 [E,V,C], rows of absent views 0. states: float32 [E,h,S], newest last,
    NaN where the episode was too young for a history.
    """

    ids: tuple[ReferenceId, ...]
    views: tuple[tuple[str, ...], ...]
    keys: np.ndarray
    states: np.ndarray


def read_episode(path: Path) -> StoredEpisode:
    """What the index needs of one file; raises EpisodeError or OSError."""
    found = os.stat(path)  # before reading: a change meanwhile makes the entry out of date, not wrong
    header, keys, states = read_header(path)
    views = [header.views(call) for call in range(len(keys))]
    return StoredEpisode(path, header.task, header.episode, header.success, views, keys, states, found.st_size,
                         found.st_mtime_ns, header.fingerprint)


def build_index(episodes: Sequence[StoredEpisode]) -> LibraryIndex:
    """References of the successful episodes; a failed one is no example to follow."""
    rows = [(e.id(call), e.views[call], e.keys[call], e.states[call])
            for e in episodes if e.success for call in range(len(e.keys))]
    key_shape = np.max([row[2].shape for row in rows], axis=0) if rows else (0, 0)
    state_shape = np.max([row[3].shape for row in rows], axis=0) if rows else (0, 0)
    keys = np.zeros((len(rows), *key_shape), np.float32)
    states = np.full((len(rows), *state_shape), np.nan, np.float32)
    for i, (_, _, key, state) in enumerate(rows):
        keys[i, :len(key)] = key
        states[i, state_shape[0] - len(state):] = state
    return LibraryIndex(tuple(row[0] for row in rows), tuple(row[1] for row in rows), keys, states)


def sharing(episodes: Sequence[StoredEpisode], index: LibraryIndex) -> list[StoredEpisode]:
    """The successful episodes with their keys in the index's array instead of a copy: they are most of the memory."""
    first, shared = 0, []
    for episode in (e for e in episodes if e.success):
        rows = index.keys[first:first + len(episode.keys)]
        shared.append(replace(episode, keys=[row[:len(v)] for row, v in zip(rows, episode.views, strict=True)]))
        first += len(rows)
    return shared


def write_cache(folder: Path, episodes: Sequence[StoredEpisode], fingerprint: Mapping[str, str]) -> None:
    """Keep what opening has read; each entry holds as long as its file has the same size and time."""
    cameras = sorted({views for e in episodes for views in e.views})
    table = [[e.task, e.episode, e.success, [cameras.index(v) for v in e.views], [len(s) for s in e.states], e.nbytes,
              e.changed_ns] for e in episodes]
    text = json.dumps({'version': _VERSION, 'fingerprint': dict(fingerprint), 'views': cameras, 'episodes': table})
    with appearing(folder / CACHE) as temporary, temporary.open('wb') as file:
        np.savez(file, table=np.frombuffer(text.encode(), np.uint8),
                 keys=np.concatenate([key for e in episodes for key in e.keys]),
                 states=np.concatenate([state for e in episodes for state in e.states]))


def read_cache(folder: Path, fingerprint: Mapping[str, str]) -> dict[Path, StoredEpisode]:
    """The cached entries by path, none when there is no cache that fits; it is never needed, so nothing is raised."""
    try:
        with np.load(folder / CACHE) as arrays:  # numpy checks the sums of what it reads, and loads no objects
            table = json.loads(arrays['table'].tobytes())
            keys, states = arrays['keys'], arrays['states']
        if (table['version'], table['fingerprint']) != (_VERSION, dict(fingerprint)):
            return {}
        return _entries(folder, table, keys, states, fingerprint)
    except FileNotFoundError:
        return {}
    except Exception as error:  # noqa: BLE001 - whatever is in that file, the episodes are still there
        log.info(f'{folder / CACHE} is of no use ({type(error).__name__}: {error}); it is made again')
        return {}


def _entries(folder: Path, table: Mapping, keys: np.ndarray, states: np.ndarray,
             fingerprint: Mapping[str, str]) -> dict[Path, StoredEpisode]:
    cameras = [tuple(views) for views in table['views']]
    found, key_row, state_row = {}, 0, 0
    for task, episode, success, view_numbers, histories, nbytes, changed_ns in table['episodes']:
        views = [cameras[number] for number in view_numbers]
        key_ends = key_row + np.cumsum([len(v) for v in views])
        state_ends = state_row + np.cumsum(histories)
        path = folder / task / f'{episode}.h5'
        found[path] = StoredEpisode(
            path, task, episode, success, views, np.split(keys[key_row:key_ends[-1]], key_ends[:-1] - key_row),
            np.split(states[state_row:state_ends[-1]], state_ends[:-1] - state_row), nbytes, changed_ns, fingerprint)
        key_row, state_row = int(key_ends[-1]), int(state_ends[-1])
    if (key_row, state_row) != (len(keys), len(states)):
        raise ValueError('its table and its arrays differ in length')
    return found


def still_same(entry: StoredEpisode | None, found: os.stat_result) -> bool:
    """Whether a cached entry still describes the file."""
    return entry is not None and (entry.nbytes, entry.changed_ns) == (found.st_size, found.st_mtime_ns)
