# SPDX-License-Identifier: Apache-2.0
"""The episode library: a directory of episode files that belong to one checkpoint."""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rmuscle_core.errors import EpisodeError, LibraryError
from rmuscle_core.library.durable import TEMPORARY, appearing, sync
from rmuscle_core.library.episode import Header, read_header, read_reference, write_episode
from rmuscle_core.library.fingerprint import check_same
from rmuscle_core.library.reference import Reference, ReferenceId

FORMAT, VERSION = 'rmuscle-library', 1
_NAME = re.compile(r'[A-Za-z0-9][A-Za-z0-9._-]{0,127}')


@dataclass(frozen=True)
class StoredEpisode:
    """An episode file that can be used; keys [V,C] and states [h,S] per call."""

    path: Path
    header: Header
    keys: list[np.ndarray]
    states: list[np.ndarray]
    nbytes: int


@dataclass(frozen=True)
class LibraryIndex:
    """What retrieval compares, one row per reference.

    views: camera names per row. keys: float32 [E,V,C], rows of absent views 0. states: float32 [E,h,S], newest last,
    NaN where the episode was too young for a history.
    """

    ids: tuple[ReferenceId, ...]
    views: tuple[tuple[str, ...], ...]
    keys: np.ndarray
    states: np.ndarray


class EpisodeLibrary:
    """References on disk; `load` reads one, `index` holds what retrieval needs.

    One thread may add episodes while another loads. The lock covers the tables, never file access.
    """

    def __init__(self, path: Path, fingerprint: Mapping[str, str], set_aside: bool) -> None:
        self.path, self.fingerprint = path, dict(fingerprint)
        self.problems: list[str] = []
        self._set_aside = set_aside
        self._lock = threading.Lock()
        self._stored: dict[tuple[str, str], StoredEpisode] = {}
        self._index: LibraryIndex | None = None

    @classmethod
    def create(cls, path: str | Path, fingerprint: Mapping[str, str]) -> EpisodeLibrary:
        """Make an empty library; raises LibraryError when there is one already or the place cannot be written."""
        path = Path(path)
        if _present(path):
            raise LibraryError(f'there is a library in {path} already; open it, or choose another folder')
        content = {'format': FORMAT, 'version': VERSION, 'fingerprint': dict(fingerprint)}
        try:
            path.mkdir(parents=True, exist_ok=True)
            with appearing(path / 'library.json') as temporary:
                temporary.write_text(json.dumps(content, indent=2) + '\n')
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have
            raise LibraryError(f'the library {path} cannot be created ({error}); choose a folder that can be written'
                               ) from error
        return cls(path, fingerprint, set_aside=True)

    @classmethod
    def open(cls, path: str | Path, fingerprint: Mapping[str, str] | None = None,
             set_aside: bool = True) -> EpisodeLibrary:
        """Open a library and check every episode's header, keys and states; large datasets are checked when loaded.

        An episode file that cannot be used is reported in ``problems``, and moved aside as ``.bad`` if ``set_aside``.
        fingerprint: of the checkpoint in use; None only looks. Raises LibraryError naming each field that differs.
        """
        path = Path(path)
        try:
            content = json.loads((path / 'library.json').read_text())
            kind, version, stored = content['format'], content['version'], dict(content['fingerprint'])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LibraryError(f'{path / "library.json"} cannot be read ({type(error).__name__}: {error}); point to '
                               'the folder that rmuscle library build wrote') from error
        if (kind, version) != (FORMAT, VERSION):
            raise LibraryError(f'{path} is {kind} version {version}, expected {FORMAT} version {VERSION}; build it '
                               'again or use the rMuscle version that wrote it')
        if fingerprint is not None:
            check_same(stored, fingerprint, path)
        library = cls(path, stored, set_aside)
        for file in sorted(path.glob('*/*.h5')):
            library._admit(file)
        return library

    @classmethod
    def open_or_create(cls, path: str | Path, fingerprint: Mapping[str, str]) -> EpisodeLibrary:
        """Open the library in ``path``, or make an empty one where there is none."""
        if not _present(Path(path)):
            try:
                return cls.create(path, fingerprint)
            except LibraryError:
                if not _present(Path(path)):  # else another process was faster
                    raise
        return cls.open(path, fingerprint)

    @property
    def episodes(self) -> list[StoredEpisode]:
        with self._lock:
            return [self._stored[key] for key in sorted(self._stored)]

    @property
    def nbytes(self) -> int:
        """Bytes on disk of the usable episodes."""
        return sum(episode.nbytes for episode in self.episodes)

    def tasks(self) -> list[str]:
        return sorted({episode.header.task for episode in self.episodes})

    def index(self) -> LibraryIndex:
        """A snapshot of every reference of a successful episode; a failed one is no example to follow."""
        with self._lock:
            if self._index is None:
                self._index = _build_index([self._stored[key] for key in sorted(self._stored)])
            return self._index

    def load(self, reference: ReferenceId) -> Reference:
        """Read one reference. A damaged file takes its episode out of use: EpisodeError, and a line in problems."""
        with self._lock:
            stored = self._stored.get((reference.task, reference.episode))
        if stored is None or not 0 <= reference.call < len(stored.keys):
            raise EpisodeError(f'{reference} is not in the library {self.path}; see what it holds with rmuscle library '
                               'info')
        try:
            return read_reference(stored.path, reference.call)
        except EpisodeError as error:
            with self._lock:
                self._stored.pop((reference.task, reference.episode), None)
                self._index = None
            self._report(stored.path, error)
            raise

    def add_episode(self, task: str, references: Sequence[Reference], success: bool, episode: str | None = None,
                    on_stage: Callable[[str], None] = lambda stage: None) -> Path:
        """Write one execution, its references in call order, as a new file; returns its path once it is on disk.

        episode: name, by default made of the time. Raises LibraryError; the library is then as it was.
        """
        episode = episode or f'{time.strftime("%Y%m%d-%H%M%S")}-{secrets.token_hex(3)}'
        for what, name in (('task', task), ('episode', episode)):
            if not _NAME.fullmatch(name):
                raise LibraryError(f'{what} name {name[:80]!r} must be 1 to 128 letters, digits, ".", "_" or "-", '
                                   'since it becomes a file name; shorten or rename it')
        if not references:
            raise LibraryError(f'episode {task}/{episode} has no policy calls; save it after its first chunk')
        path = self.path / task / f'{episode}.h5'
        try:
            with self._writing():
                if path.exists():
                    raise LibraryError(f'{path} exists already and is never overwritten; choose another episode name')
                path.parent.mkdir(exist_ok=True)
                sync(self.path)
                write_episode(path, task, success, self.fingerprint, references, on_stage)
        except (OSError, RuntimeError, ValueError) as error:  # h5py raises these when the disk is full
            raise LibraryError(f'episode {path} could not be written ({type(error).__name__}: {error}); check free '
                               'space and permissions') from error
        self._admit(path)
        return path

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """One writer at a time, over all processes; what an earlier one left unfinished is removed."""
        with (self.path / '.lock').open('w') as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for unfinished in self.path.glob(f'*/.*.h5{TEMPORARY}'):
                unfinished.unlink(missing_ok=True)
            yield

    def _admit(self, path: Path) -> None:
        try:
            header, keys, states = read_header(path)
            if (header.task, header.episode) != (path.parent.name, path.stem):
                raise EpisodeError(f'episode {path} says that it is {header.task}/{header.episode}; restore its name')
            check_same(header.fingerprint, self.fingerprint, path)
            with self._lock:
                _check_widths(path, keys, states, next(iter(self._stored.values()), None))
                stored = StoredEpisode(path, header, keys, states, path.stat().st_size)
                self._stored[(header.task, header.episode)] = stored
                self._index = None
        except (LibraryError, OSError) as error:
            self._report(path, error)

    def _report(self, path: Path, error: Exception) -> None:
        self.problems.append(str(error))
        if self._set_aside:
            try:
                os.replace(path, path.with_name(path.name + '.bad'))
            except OSError as failure:  # read-only media: the report is all that can be done
                self.problems.append(f'{path} could not be moved aside ({failure}); move it out of the library')


def _present(path: Path) -> bool:
    try:
        return (path / 'library.json').exists()
    except OSError as error:  # a folder on the way may not be looked into, or a name is too long
        raise LibraryError(f'the library {path} cannot be reached ({error}); choose another folder') from error


def _check_widths(path: Path, keys: list[np.ndarray], states: list[np.ndarray], first: StoredEpisode | None) -> None:
    found = {(key.shape[1], state.shape[1]) for key, state in zip(keys, states, strict=True)}
    if first:
        found.add((first.keys[0].shape[1], first.states[0].shape[1]))
    if len(found) != 1:
        raise EpisodeError(f'episode {path} has key and state widths other than the library: {sorted(found)}; '
                           'record the episode again')


def _build_index(episodes: list[StoredEpisode]) -> LibraryIndex:
    rows = [(e.header.id(call), e.header.views(call), e.keys[call], e.states[call])
            for e in episodes if e.header.success for call in range(len(e.keys))]
    key_shape = np.max([row[2].shape for row in rows], axis=0) if rows else (0, 0)
    state_shape = np.max([row[3].shape for row in rows], axis=0) if rows else (0, 0)
    keys = np.zeros((len(rows), *key_shape), np.float32)
    states = np.full((len(rows), *state_shape), np.nan, np.float32)
    for i, (_, _, key, state) in enumerate(rows):
        keys[i, :len(key)] = key
        states[i, state_shape[0] - len(state):] = state
    return LibraryIndex(tuple(row[0] for row in rows), tuple(row[1] for row in rows), keys, states)
