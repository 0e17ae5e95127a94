# SPDX-License-Identifier: Apache-2.0
"""From files that claim to be episodes to those a library may use."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rmuscle_core.errors import EpisodeError, LibraryError, reason
from rmuscle_core.library import folder
from rmuscle_core.library.fingerprint import check_same
from rmuscle_core.library.index import StoredEpisode, read_episode
from rmuscle_core.library.reference import Reference

Widths = tuple[int, int]  # (C, S): numbers of a key and of a state


def find_files(library: Path, report: Callable[[str], None]) -> dict[Path, os.DirEntry]:
    """Every file that claims to be an episode; raises LibraryError when the library's folder cannot be read."""
    try:
        tasks = folder.task_folders(library)
    except OSError as error:
        raise LibraryError(f'the library {library} cannot be read ({reason(error)}); restore the folder') from error
    files = {}
    for task in tasks:
        try:
            files.update({Path(entry): entry for entry in folder.episode_files(task)})
        except OSError as error:
            report(f'the folder {task} cannot be read ({reason(error)}); its episodes are not used until it can')
    return files


def read_checked(path: Path, fingerprint: Mapping[str, str]) -> StoredEpisode:
    """Read what the index needs; raises LibraryError when the file is damaged, misnamed or of another checkpoint."""
    try:
        check_names(path.parent.name, path.stem)
    except EpisodeError as error:
        raise EpisodeError(f'episode {path} is not used: its {error}') from error
    stored = read_episode(path)
    if (stored.task, stored.episode) != (path.parent.name, path.stem):
        raise EpisodeError(f'episode {path} says that it is {stored.task[:80]}/{stored.episode[:80]}; restore its name')
    check_same(stored.fingerprint, fingerprint, path)
    return stored


def check_names(task: str, episode: str) -> None:
    """Raise EpisodeError for what can be no folder's or file's name here."""
    for what, name in (('task', task), ('episode', episode)):
        if not folder.NAME.fullmatch(name):
            raise EpisodeError(f'{what} name {name[:80]!r} must be 1 to 128 letters, digits, ".", "_" or "-", since it '
                               'is a file name; shorten or rename it')


def usual_widths(episodes: Sequence[StoredEpisode]) -> Widths | None:
    """The widths that most episodes have; one broken file must not make the others look wrong."""
    counts = Counter(next(iter(e.widths)) for e in episodes if len(e.widths) == 1)
    return counts.most_common(1)[0][0] if counts else None


def widths_of(references: Sequence[Reference]) -> set[Widths]:
    return {(r.key.shape[-1], r.states.shape[-1]) for r in references}


def other_widths(where: object, found: set[Widths], expected: Widths | None) -> EpisodeError:
    return EpisodeError(f'episode {where} has keys and states of {" and ".join(map(str, sorted(found)))} numbers, '
                        f'expected {expected or "the same in every call"}; record the episode again')
