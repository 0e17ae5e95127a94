# SPDX-License-Identifier: Apache-2.0
"""Bring a library's folder into order; nothing that was recorded is deleted."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rmuscle_core.errors import EpisodeError, LibraryError, reason
from rmuscle_core.library import folder, manifest
from rmuscle_core.library.durable import sync
from rmuscle_core.library.episode import is_damage, read_header, verify_episode
from rmuscle_core.library.fingerprint import check_same
from rmuscle_core.library.index import CACHE
from rmuscle_core.library.intake import check_names
from rmuscle_core.library.library import EpisodeLibrary


@dataclass
class Repair:
    """One sentence per thing: wrong and put right, not put right, and tidied without having been wrong."""

    repaired: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    tidied: list[str] = field(default_factory=list)


def repair(library: Path, on_file: Callable[[Path], None] = lambda path: None) -> Repair:
    """Verify every episode; move aside what is broken, bring back what is whole, under the name in its header.

    A missing or damaged library.json is made again from the episodes when they agree. Raises LibraryError when that
    cannot be done, and when another process is writing to the library.
    """
    done = Repair()
    if not manifest.present(library) and not any(library.glob(f'*/*{folder.EPISODE}*')):
        manifest.read(library)  # raises: nothing here is ours, and no lock belongs here
    try:
        with folder.lock(library, wait=False) as alone:
            if not alone:
                raise LibraryError(f'another process is writing to the library {library}; repair it when that is done')
            fingerprint = _manifest(library, done)  # first: if this is no library, nothing in it is ours
            done.tidied += [f'{path} was left by a writer that did not finish; removed'
                            for path in folder.remove_unfinished(library)]
            for path in _episodes(library):
                on_file(path)
                _episode(library, path, fingerprint, done)
            (library / CACHE).unlink(missing_ok=True)
    except OSError as error:
        raise LibraryError(f'the library {library} cannot be repaired ({reason(error)}); {folder.next_step(error)}'
                           ) from error
    EpisodeLibrary.open(library)  # writes its index again
    return done


def _episodes(library: Path) -> list[Path]:
    """Episodes, good ones before those set aside, so that one which came back from a backup keeps its name."""
    files = [path for task in folder.task_folders(library) for path in sorted(task.iterdir())
             if not path.name.startswith('.')]
    aside = [path for path in files if f'{folder.EPISODE}{folder.BROKEN}' in path.name]
    return [path for path in files if path.suffix == folder.EPISODE] + aside


def _episode(library: Path, path: Path, fingerprint: dict[str, str], done: Repair) -> None:
    aside = path.suffix != folder.EPISODE
    try:
        header = verify_episode(path)
        check_names(header.task, header.episode)
        check_same(header.fingerprint, fingerprint, path)
    except LibraryError as error:
        if not aside:
            _move_aside(path, error, done)
        return
    proper = library / header.task / f'{header.episode}{folder.EPISODE}'
    if path == proper:
        return
    if not os.path.lexists(proper):
        proper.parent.mkdir(exist_ok=True)
        os.replace(path, proper)
        sync(proper.parent)
        done.repaired.append(f'{path} is whole; it is {proper} again')
    elif not aside:
        _move_aside(path, EpisodeError(f'{path} says that it is {proper}, which exists'), done)


def _move_aside(path: Path, error: LibraryError, done: Repair) -> None:
    if isinstance(error, EpisodeError) and not is_damage(error):
        done.left.append(str(error))
        return
    try:
        done.repaired.append(f'{error}; moved to {folder.set_aside(path)}')
    except OSError as failure:
        done.left.append(f'{error}; it could not be moved aside ({reason(failure)})')


def _manifest(library: Path, done: Repair) -> dict[str, str]:
    try:
        return manifest.read(library)
    except manifest.OtherVersion:
        raise
    except LibraryError as error:
        found = []
        for path in _episodes(library):
            try:
                found.append(read_header(path)[0].fingerprint)
            except EpisodeError:
                continue
        if not found or not found[0].get('weights') or any(other != found[0] for other in found):
            raise LibraryError(f'{library / manifest.NAME} is lost or damaged, and {len(found)} readable episodes do '
                               'not tell what the library was made with; build it again') from error
        if os.path.lexists(library / manifest.NAME):
            folder.set_aside(library / manifest.NAME)
        manifest.write(library, found[0])
        done.repaired.append(f'{error}; made again from {len(found)} episodes that agree')
        return found[0]
