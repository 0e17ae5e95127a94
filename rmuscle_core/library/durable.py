# SPDX-License-Identifier: Apache-2.0
"""Files that are either absent or whole, whatever happens while they are written."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TEMPORARY = '.tmp'


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; when the block ends without an error it becomes ``path`` at once.

    The block writes and closes the temporary file, and may check it after `sync`. A crash leaves at most a hidden
    ``.NAME.tmp``, which no reader looks at.
    """
    temporary = path.with_name(f'.{path.name}{TEMPORARY}')
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Force a file's content, or a directory's names, onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # some network file systems cannot sync a folder, and write its names at once
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.EOPNOTSUPP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)
