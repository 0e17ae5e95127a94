# SPDX-License-Identifier: Apache-2.0
"""The episode library: a directory of episode files that belong to one checkpoint."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from rmuscle_core.errors import EpisodeError, LibraryError, reason
from rmuscle_core.library import folder, manifest
from rmuscle_core.library.durable import sync
from rmuscle_core.library.episode import is_damage, read_reference, write_episode
from rmuscle_core.library.fingerprint import check_same
from rmuscle_core.library.index import (
    LibraryIndex,
    StoredEpisode,
    build_index,
    read_cache,
    sharing,
    still_same,
    write_cache,
)
from rmuscle_core.library.intake import (
    Widths,
    check_names,
    find_files,
    other_widths,
    read_checked,
    usual_widths,
    widths_of,
)
from rmuscle_core.library.reference import Reference, ReferenceId
from rmuscle_core.library.usage import Usage, eviction_order

log = logging.getLogger(__name__)


class EpisodeLibrary:
    """References on disk; `load` reads one, `index` holds what retrieval needs.

    One thread may add episodes while another loads. The lock covers the tables, never file access.
    """

    def __init__(self, path: Path, fingerprint: Mapping[str, str], set_aside: bool = True,
                 widths: Widths | None = None) -> None:
        self.path, self.fingerprint, self.widths = path, dict(fingerprint), widths
        self.problems: list[str] = []
        self._set_aside = set_aside
        self._refused: set[Path] = set()  # files that stay where they are, reported once
        self._usage = Usage()
        self._lock = threading.Lock()
        self._stored: dict[tuple[str, str], StoredEpisode] = {}
        self._index: LibraryIndex | None = None

    @classmethod
    def create(cls, path: str | Path, fingerprint: Mapping[str, str],
               widths: Widths | None = None) -> EpisodeLibrary:
        """Make an empty library; raises LibraryError when there is one already or the place cannot be written."""
        path = Path(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            with folder.lock(path):
                if manifest.present(path):
                    raise LibraryError(f'there is a library in {path} already; open it, or choose another folder')
                manifest.write(path, fingerprint)
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have
            raise LibraryError(f'the library {path} cannot be created ({reason(error)}); choose a folder that can be '
                               'written') from error
        return cls(path, fingerprint, widths=widths)

    @classmethod
    def open(cls, path: str | Path, fingerprint: Mapping[str, str] | None = None, set_aside: bool = True,
             widths: Widths | None = None) -> EpisodeLibrary:
        """Open a library and check every episode's header, keys and states; large datasets are checked when loaded.

        An episode file that cannot be used is reported in ``problems``, and moved aside as ``.bad`` if ``set_aside``;
        without it nothing on disk is changed.
        fingerprint: of the checkpoint in use; None only looks. widths: (C, S) of its keys and states; None: as most
        of the episodes. Raises LibraryError naming each field that differs.
        """
        path = Path(path)
        stored = manifest.read(path)
        if fingerprint is not None:
            check_same(stored, fingerprint, path)
        library = cls(path, stored, set_aside, widths)
        library._when_alone(lambda: folder.remove_unfinished(path))
        library.refresh(read_cache(path, stored))
        return library

    @classmethod
    def open_or_create(cls, path: str | Path, fingerprint: Mapping[str, str],
                       widths: Widths | None = None) -> EpisodeLibrary:
        """Open the library in ``path``, or make an empty one where there is none."""
        if not manifest.present(Path(path)):
            try:
                return cls.create(path, fingerprint, widths)
            except LibraryError:
                if not manifest.present(Path(path)):  # else another process was faster
                    raise
        return cls.open(path, fingerprint, widths=widths)

    @property
    def episodes(self) -> list[StoredEpisode]:
        with self._lock:
            return [self._stored[key] for key in sorted(self._stored)]

    @property
    def nbytes(self) -> int:
        """Bytes on disk of the usable episodes."""
        return sum(episode.nbytes for episode in self.episodes)

    def tasks(self) -> list[str]:
        return sorted({episode.task for episode in self.episodes})

    def index(self) -> LibraryIndex:
        """A snapshot of every reference of a successful episode; a failed one is no example to follow."""
        with self._lock:
            if self._index is None:
                episodes = [self._stored[key] for key in sorted(self._stored)]
                self._index = build_index(episodes)
                self._stored.update({(e.task, e.episode): e for e in sharing(episodes, self._index)})
            return self._index

    def load(self, reference: ReferenceId, check: Callable[[Reference], None] = lambda reference: None) -> Reference:
        """Read one reference; raises EpisodeError.

        check: raises EpisodeError for a reference that the caller's model cannot take. A damaged file, and one that
        fails this, is out of use with its whole episode: a line in problems. One that another process deleted or
        evicted is forgotten.
        """
        self._usage.write(self._stored.get)
        stored = self._stored.get((reference.task, reference.episode))
        if stored is None or not 0 <= reference.call < len(stored.keys):
            raise EpisodeError(f'{reference} is not in the library {self.path}; see what it holds with rmuscle library '
                               'info')
        try:
            read = read_reference(stored.path, reference.call)
            check(read)
            return read
        except EpisodeError as error:
            with self._lock:
                self._stored.pop((reference.task, reference.episode), None)
                self._index = None
            if stored.path.exists():
                self._refuse(stored.path, error)
                raise
            self._notice_absence()
            raise EpisodeError(f'{reference} is no longer in the library {self.path}: its file was removed meanwhile; '
                               'nothing needs to be done') from error

    def used(self, reference: ReferenceId) -> None:
        """Note that a call was served by this reference; costs no file access, reaches the disk with a later one."""
        self._usage.note(reference)

    def add_episode(self, task: str, references: Sequence[Reference], success: bool, episode: str | None = None,
                    on_stage: Callable[[str], None] = lambda stage: None) -> Path:
        """Write one execution, its references in call order, as a new file; returns its path once it is on disk.

        episode: name, by default made of the time. Raises LibraryError; the library is then as it was.
        """
        episode = episode or f'{time.strftime("%Y%m%d-%H%M%S")}-{secrets.token_hex(3)}'
        path = self.path / task / f'{episode}{folder.EPISODE}'
        self._check_new(task, episode, references)
        try:
            with self._writing():
                if path.exists():
                    raise LibraryError(f'{path} exists already and is never overwritten; choose another episode name')
                try:
                    path.parent.mkdir(exist_ok=True)
                    sync(self.path)
                    write_episode(path, task, success, self.fingerprint, references, on_stage)
                except BaseException:
                    with contextlib.suppress(OSError):
                        path.unlink(missing_ok=True)  # visible, but perhaps not to stay: the folder was not synced
                    raise
        except (OSError, RuntimeError, ValueError) as error:
            raise LibraryError(f'episode {path} could not be written ({reason(error)}); '
                               f'{folder.next_step(error)}') from error
        try:
            self._accept([read_checked(path, self.fingerprint)])
        except (LibraryError, OSError) as error:
            raise LibraryError(f'episode {path} was written but cannot be used: {error}') from error
        return path

    def evict(self, capacity: int, keep: Path | None = None) -> list[StoredEpisode]:
        """Delete episodes until the library takes at most ``capacity`` bytes; 0 keeps everything. Returns the deleted.

        Failed episodes go first, then those that served longest ago, of equals the older. keep: is not deleted.
        A reader that has such a file open keeps what it reads; another process forgets it when it asks for it.
        A place that cannot be written is a line in problems: what was just saved is saved.
        """
        if not capacity:
            return []
        self._usage.write(self._stored.get)
        evicted = []
        try:
            with folder.lock(self.path):
                self.refresh()  # what other processes wrote counts too
                excess = self.nbytes - capacity
                for episode in eviction_order(e for e in self.episodes if e.path != keep) if excess > 0 else ():
                    if excess <= 0:
                        break
                    episode.path.unlink(missing_ok=True)
                    folder.mark_of(episode.path).unlink(missing_ok=True)
                    evicted.append(episode)
                    excess -= episode.nbytes
        except (OSError, LibraryError) as error:
            self._report(f'the library {self.path} could not be brought to its capacity ({reason(error)}); '
                         f'{folder.next_step(error)}')
        self._drop(evicted)
        for episode in evicted:
            log.info(f'episode {episode.task}/{episode.episode} was deleted: the library exceeds its capacity of '
                     f'{capacity / 1e6:g} MB')
        return evicted

    def refresh(self, cached: Mapping[Path, StoredEpisode] | None = None, again: bool = False) -> None:
        """Take in the episodes that appeared on disk and forget those that went.

        cached: entries by path, believed for files of the same size and time. again: files refused before may have
        been put right; ``problems`` then holds what is still wrong. Raises LibraryError when the folder cannot be read.
        """
        if again:
            self.problems, self._refused = [], set()
        files = find_files(self.path, self._report)
        known = {e.path for e in self.episodes} | self._refused
        self._drop([e for e in self.episodes if e.path not in files])
        found, read = [], 0
        for path, entry in files.items():
            if path not in known:
                try:
                    usable = (cached or {}).get(path)
                    usable = usable if still_same(usable, entry.stat()) else None
                    found.append(usable or read_checked(path, self.fingerprint))
                    read += usable is None
                except (LibraryError, OSError) as error:
                    self._refuse(path, error)
        self._accept(found)
        if self.episodes and read > max(20, len(found) // 8):  # fewer are read faster than all are written
            self._when_alone(lambda: write_cache(self.path, self.episodes, self.fingerprint))

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """One writer at a time, over all processes; what an earlier one left unfinished is removed."""
        with folder.lock(self.path) as alone:
            if alone:
                folder.remove_unfinished(self.path)
            yield

    def _when_alone(self, action: Callable[[], object]) -> None:
        """Do what a library opened for use does to its folder, unless another process is writing there."""
        if self._set_aside:
            with contextlib.suppress(OSError), folder.lock(self.path, wait=False) as alone:  # read-only: goes without
                if alone:
                    action()

    def _check_new(self, task: str, episode: str, references: Sequence[Reference]) -> None:
        check_names(task, episode)
        if not references:
            raise LibraryError(f'episode {task}/{episode} has no policy calls; save it after its first chunk')
        found, expected = widths_of(references), self.widths or usual_widths(self.episodes)
        if len(found) > 1 or (expected and found != {expected}):
            raise other_widths(f'{task}/{episode}', found, expected)

    def _accept(self, found: Sequence[StoredEpisode]) -> None:
        """Put the episodes into use, but for those of other widths, which retrieval could not compare."""
        widths = self.widths or usual_widths([*self.episodes, *found])
        usable = [episode for episode in found if episode.widths == {widths}]
        with self._lock:
            self._stored.update({(e.task, e.episode): e for e in usable})
            self._index = None
        for episode in found:
            if episode.widths != {widths}:
                self._refuse(episode.path, other_widths(episode.path, episode.widths, widths))

    def _drop(self, episodes: Sequence[StoredEpisode]) -> None:
        if episodes:
            with self._lock:
                for episode in episodes:
                    self._stored.pop((episode.task, episode.episode), None)
                self._index = None

    def _refuse(self, path: Path, error: Exception) -> None:
        """Report a file that is not used; one that is broken is renamed, if this library may."""
        self._report(str(error))
        self._refused.add(path)
        if self._set_aside and is_damage(error):
            try:
                folder.set_aside(path)
            except FileNotFoundError:
                pass  # another process was faster
            except OSError as failure:  # read-only media: the report is all that can be done
                self._report(f'{path} could not be moved aside ({reason(failure)}); move it out of the library')

    def _notice_absence(self) -> None:
        with contextlib.suppress(LibraryError):
            if manifest.present(self.path):
                return
        self._report(f'the library {self.path} is gone; calls run without it until it is back and configured again')

    def _report(self, problem: str) -> None:
        sentence = ' '.join(problem.split())  # a file's name may hold anything
        if sentence not in self.problems:
            self.problems.append(sentence)
