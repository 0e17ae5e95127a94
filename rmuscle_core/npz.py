# SPDX-License-Identifier: Apache-2.0
"""Reading .npz files that may be anything."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

FAULTS = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error)  # of a file that is damaged


@contextmanager
def opened(path: str | Path) -> Iterator[np.lib.npyio.NpzFile]:
    """The archive, by whose names arrays are read; opening and reading raise one of FAULTS."""
    with Path(path).open('rb') as file:
        if not zipfile.is_zipfile(file):  # numpy would take other files for pickles or single arrays
            raise ValueError('it is no .npz file, or only the beginning of one')
        with np.load(file, allow_pickle=False) as archive:
            yield archive
