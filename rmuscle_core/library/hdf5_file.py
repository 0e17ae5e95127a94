# SPDX-License-Identifier: Apache-2.0
"""HDF5 files written through Python, because HDF5's own writing does not survive a full disk.

When one of its writes fails, HDF5 (2.0) forgets the reason and may crash the process as it tidies up. Here it never
sees the failure: the first one is kept, what follows is dropped, and whoever writes is told as soon as it asks.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import h5py


class _Sink(io.RawIOBase):
    """The file under an HDF5 file being written; ``error`` is the first failure."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        self._position = 0
        self.error: OSError | None = None

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: os.fstat(self._descriptor).st_size}
        self._position = origin[whence] + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: memoryview) -> int:
        data = os.pread(self._descriptor, len(buffer), self._position)
        buffer[:len(data)] = data
        self._position += len(data)
        return len(data)

    def write(self, data: memoryview) -> int:
        view, done = memoryview(data), 0
        try:
            while not self.error and done < len(view):
                done += os.pwrite(self._descriptor, view[done:], self._position + done)
        except OSError as error:
            self.error = error
        self._position += len(view)
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        size = self._position if size is None else size
        try:
            if not self.error:
                os.ftruncate(self._descriptor, size)
        except OSError as error:
            self.error = error
        return size

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        super().close()

    def check(self) -> None:
        if self.error:
            raise self.error


class WrittenFile(h5py.File):
    """An HDF5 file being written; ``check`` raises the OSError of the first write that failed, if one did."""

    def __init__(self, sink: _Sink) -> None:
        super().__init__(sink, 'w')
        self.check = sink.check


@contextmanager
def writing(path: Path) -> Iterator[WrittenFile]:
    """A new HDF5 file at ``path``, closed when the block ends; raises OSError with its errno when the disk refuses."""
    with _Sink(path) as sink:
        with WrittenFile(sink) as file:
            yield file
        sink.check()


def only_hard_links(group: h5py.Group, *names: str) -> None:
    """Raise KeyError where a path below the group leaves the file, or goes round in it, by a soft or external link."""
    for name in names:
        steps = name.split('/')
        for depth in range(1, len(steps) + 1):
            place = '/'.join(steps[:depth])
            link = group.get(place, getlink=True)
            if not isinstance(link, h5py.HardLink):
                raise KeyError(f'{place} is a {type(link).__name__}, which may lead anywhere')
