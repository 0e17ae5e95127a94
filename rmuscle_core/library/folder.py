# SPDX-License-Identifier: Apache-2.0
"""The library's directory: names in it, the writers' lock, and what to do about what should not be there."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rmuscle_core.library.durable import TEMPORARY

NAME = re.compile(r'[A-Za-z0-9][A-Za-z0-9._-]{0,127}')
EPISODE, BROKEN, USED = '.h5', '.bad', '.used'
_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_NEXT_STEP = {
    errno.ENOSPC: 'free some space or set library_capacity', errno.EDQUOT: 'free some space or set library_capacity',
    errno.EFBIG: 'the file system or a limit of this process allows no file of this size',
    errno.EROFS: 'the place is read-only: choose another, or mount it for writing',
    errno.EACCES: 'let this user write to the folder', errno.EPERM: 'let this user write to the folder',
    errno.ENOENT: 'the folder is gone: mount or restore it, and configure again',
    errno.ESTALE: 'the folder is gone: mount or restore it, and configure again',
}


def next_step(error: Exception) -> str:
    """What helps against a failure to write."""
    return _NEXT_STEP.get(getattr(error, 'errno', None), 'check the disk')


@contextmanager
def lock(folder: Path, wait: bool = True) -> Iterator[bool]:
    """Yield whether this is the only writer, over all processes; without ``wait`` False when another one is.

    A file system that has no locks yields False too: writing works there, since names are unique, but nothing that
    could be another writer's may be touched.
    """
    with (folder / '.lock').open('a') as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            alone = True
        except OSError as error:
            if error.errno not in _NO_LOCKS and not isinstance(error, BlockingIOError):
                raise
            alone = False
        yield alone


def task_folders(folder: Path) -> list[Path]:
    """Raises OSError when the folder cannot be read."""
    with os.scandir(folder) as entries:
        return sorted(Path(entry) for entry in entries if not entry.name.startswith('.') and entry.is_dir())


def episode_files(task: Path) -> list[os.DirEntry]:
    """Entries of a task's folder that claim to be episodes, by name; hidden ones belong to somebody else."""
    with os.scandir(task) as entries:
        return sorted((entry for entry in entries if entry.name.endswith(EPISODE) and not entry.name.startswith('.')),
                      key=lambda entry: entry.name)


def set_aside(path: Path) -> Path:
    """Rename to NAME.bad, or the next free NAME.bad2, ...; returns where it is now. Raises OSError."""
    aside = path.with_name(path.name + BROKEN)
    number = 1
    while os.path.lexists(aside):
        number += 1
        aside = path.with_name(f'{path.name}{BROKEN}{number}')
    os.replace(path, aside)
    return aside


def remove_unfinished(folder: Path) -> list[Path]:
    """Remove what a killed writer left, and usage marks of episodes that are gone; only for who holds the lock."""
    removed = []
    for stale in [*folder.glob(f'.library.json{TEMPORARY}'), *folder.glob(f'..index.npz{TEMPORARY}'),
                  *folder.glob(f'*/.*{EPISODE}{TEMPORARY}')]:
        stale.unlink(missing_ok=True)
        removed.append(stale)
    for mark in folder.glob(f'*/.*{USED}'):
        if not mark.with_name(mark.name[1:-len(USED)] + EPISODE).exists():
            mark.unlink(missing_ok=True)
    return removed


def remove_empty(folder: Path) -> None:
    """Take away a library that never got an episode; whatever else is in the folder stays."""
    with contextlib.suppress(OSError), lock(folder, wait=False) as alone:
        if alone and not any(folder.glob(f'*/*{EPISODE}*')):
            for name in ('library.json', '.lock'):
                (folder / name).unlink(missing_ok=True)
            for place in (*task_folders(folder), folder):
                with contextlib.suppress(OSError):  # something is in it
                    place.rmdir()


def mark_of(path: Path) -> Path:
    """The empty file whose time is when the episode at ``path`` last served a call."""
    return path.with_name(f'.{path.stem}{USED}')
