# SPDX-License-Identifier: Apache-2.0
"""What rMuscle raises on bad input: one sentence with expected, found, where, and the next step."""

from __future__ import annotations

import json
import os
import re

LONGEST = 1500  # characters; a longer text quotes its input instead of describing it


class RMuscleError(Exception):
    """Base of every refusal; its text is fit to be shown to an operator as it is: one line, whatever it quotes."""

    def __init__(self, text: str = '') -> None:
        line = ' '.join(str(text).split())
        super().__init__(line if len(line) <= LONGEST else f'{line[:LONGEST // 2]} [...] {line[-LONGEST // 4:]}')


class CheckpointError(RMuscleError):
    """The checkpoint directory cannot be used (missing, foreign, incomplete)."""


class ObservationError(RMuscleError):
    """An observation does not fit the policy (camera, joint, size, encoding)."""


class LibraryError(RMuscleError):
    """The episode library cannot be used as a whole (foreign fingerprint, unreadable index)."""


class EpisodeError(LibraryError):
    """One episode file is unusable; the others still are."""


class SettingsError(RMuscleError):
    """A setting has the wrong type or lies outside its range."""


class DeviceError(RMuscleError):
    """The device failed and takes every further call in this process with it: only a new process helps."""


def reason(error: Exception) -> str:
    """Why something could not be read or written, as part of a sentence: without the name of a Python class."""
    mark = getattr(error, 'problem_mark', None)  # of YAML
    if mark:
        return f'line {mark.line + 1}: {error.problem}'
    if isinstance(error, json.JSONDecodeError):
        return f'it is no JSON, line {error.lineno}: {error.msg}'
    if isinstance(error, UnicodeError):
        return 'it is no text'
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    if isinstance(error, MemoryError):
        return 'the memory does not suffice'
    if isinstance(error, KeyError) and ' ' not in str(error):
        return f'it has no {error.args[0] if error.args else "such entry"}'
    if isinstance(error, (TypeError, AttributeError, IndexError)):
        return 'it is laid out in another way'
    text = ' '.join((str(error.args[0]) if isinstance(error, KeyError) else str(error)).split()).rstrip('.')
    if 'file signature not found' in text:
        return 'it is no HDF5 file'
    text = re.sub(r'^Unable to [^(]*\(([^:)]+).*$', r'\1', text) or 'it is damaged'  # HDF5 adds its internals
    return text if len(text) <= 300 else f'{text[:297]}...'
