# SPDX-License-Identifier: Apache-2.0
"""``library.json``: that a directory is a library, and what it was made with."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from pathlib import Path

from rmuscle_core.errors import LibraryError, reason
from rmuscle_core.library.durable import appearing

NAME = 'library.json'
FORMAT, VERSION = 'rmuscle-library', 1
_MAX_BYTES = 1 << 20


class OtherVersion(LibraryError):
    """The library is whole, but of a format that this version does not know."""


def present(folder: Path) -> bool:
    """Whether there is a library; raises LibraryError when that cannot be seen."""
    try:
        (folder / NAME).stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:  # a folder on the way may not be looked into, or no file can have the name
        raise LibraryError(f'the library {folder} cannot be reached ({reason(error)}); choose another folder'
                           ) from error
    return True


def write(folder: Path, fingerprint: Mapping[str, str]) -> None:
    """Raises OSError."""
    content = {'format': FORMAT, 'version': VERSION, 'fingerprint': dict(fingerprint)}
    with appearing(folder / NAME) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + '\n')


def read(folder: Path) -> dict[str, str]:
    """The fingerprint; raises LibraryError when the folder is no library of this version."""
    path = folder / NAME
    if not present(folder):
        lost = any(folder.glob('*/*.h5*'))
        raise LibraryError(f'{path} is lost, but episodes are there; try rmuscle library verify --repair' if lost else
                           f'there is no library at {folder}; give the folder that "rmuscle library build" made')
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MAX_BYTES:
            raise ValueError(f'expected a file of at most {_MAX_BYTES} bytes')
        content = json.loads(path.read_text())
        kind, version, fingerprint = content['format'], content['version'], content['fingerprint']
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise LibraryError(f'{path} cannot be read ({reason(error)}); try rmuscle library verify --repair, or give '
                           'another folder that "rmuscle library build" made') from error
    if (kind, version) != (FORMAT, VERSION):
        raise OtherVersion(f'{folder} is {str(kind)[:40]} version {str(version)[:40]}, expected {FORMAT} version '
                           f'{VERSION}; build it again or use the rMuscle version that wrote it')
    texts = isinstance(fingerprint, dict) and all(isinstance(value, str) for value in fingerprint.values())
    if not texts or not fingerprint.get('weights'):
        raise LibraryError(f'{path} does not say which weights the library was made with; without that it fits no '
                           'checkpoint, build it again')
    return fingerprint
