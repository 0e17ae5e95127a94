# SPDX-License-Identifier: Apache-2.0
"""Command-line options that several commands share, and what a value of an option has to be."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rmuscle_core.errors import SettingsError
from rmuscle_core.settings import check, rows

MOST = 10**9  # a number beyond it is a slip of the hand


def whole(low: int, high: int = MOST) -> Callable[[str], int]:
    """Type of an option: a whole number in [low, high]."""
    return _checked(int, lambda value: low <= value <= high, f'a whole number from {low} to {high:,}')


def number(low: float = 0.0, high: float = MOST) -> Callable[[str], float]:
    """Type of an option: a number in [low, high]."""
    return _checked(float, lambda value: low <= value <= high, f'a number from {low:g} to {high:,g}')


def positive(text: str) -> float:
    """Type of an option: a number above 0."""
    return _checked(float, lambda value: 0 < value <= MOST, f'a number above 0, at most {MOST:,}')(text)


def _checked(kind: type, allowed: Callable[[Any], bool], expected: str) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not allowed(value):
            raise ArgumentTypeError(f'expected {expected}, not {text!r}')
        return value
    return parse


def output_folder(text: str) -> Path:
    """Type of an option: a folder to write to, there already or not."""
    return _writable(Path(text), Path.is_dir, 'a folder')


def output_file(text: str) -> Path:
    """Type of an option: a file to write; one that is there is replaced."""
    return _writable(Path(text), lambda path: not path.is_dir(), 'a file')


def new_folder(text: str) -> Path:
    """Type of an option: a folder to make, not there yet."""
    if Path(text).exists():
        raise ArgumentTypeError(f'{text} is there already and is not overwritten; choose another name')
    return output_folder(text)


def _writable(path: Path, fits: Callable[[Path], bool], kind: str) -> Path:
    """Refused before the work whose result would have nowhere to go."""
    try:
        nearest = next(place for place in (path, *path.absolute().parents) if place.exists())
    except OSError as error:
        raise ArgumentTypeError(f'{path} cannot be written ({os.strerror(error.errno)}); choose another') from error
    if nearest == path and not fits(path):
        raise ArgumentTypeError(f'{path} is not {kind}, and {kind} is written there; choose another name')
    if nearest != path and not nearest.is_dir():
        raise ArgumentTypeError(f'{path} cannot be made, since {nearest} is a file; choose another place')
    if not os.access(nearest, os.W_OK):
        raise ArgumentTypeError(f'{path} cannot be written, since this user may not write to {nearest}; choose another '
                                'place')
    return path


def add_device(parser: argparse.ArgumentParser) -> None:
    """Where the policy runs."""
    parser.add_argument('--device', default='cpu', help='where the policy runs: cpu, cuda, cuda:1, ... (default: cpu)')


def add_settings(parser: argparse.ArgumentParser) -> None:
    """One option for every row of the settings table; what is not given is None."""
    group = parser.add_argument_group('settings', 'as in docs/parameters.md')
    for row in rows():
        meta = row.metadata
        span = '' if meta['choices'] else f'{meta["low"]:g} to {meta["high"]:,} {meta["unit"]}'.rstrip() + '; '
        group.add_argument(f'--{row.name.replace("_", "-")}', type=_setting(row.name, type(row.default)),
                           help=f'{meta["description"]} ({span}default: {row.default})',
                           metavar='|'.join(meta['choices']) or type(row.default).__name__)


def _setting(name: str, kind: type) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        with contextlib.suppress(ValueError):
            text = kind(text)
        try:
            return check(name, text)  # a text where a number belongs is refused there too
        except SettingsError as error:
            raise ArgumentTypeError(str(error)) from error
    return parse


def given_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given, for ``Settings.with_values``."""
    return {row.name: getattr(args, row.name) for row in rows() if getattr(args, row.name) is not None}


def check_library(path: Path | None) -> None:
    """Raise LibraryError for a library that is not there: a mistyped path must not become an empty one."""
    if path is not None:
        from rmuscle_core.library import manifest  # brings torch, which --help can do without

        manifest.read(path)


def pairs(option: str, texts: Sequence[str]) -> dict[str, str]:
    """``NAME=VALUE`` texts of a repeated option as a dictionary; SettingsError for anything else."""
    for text in texts:
        if not all(text.partition('=')):
            raise SettingsError(f'{option} {text} must be two names with "=" between them')
    found = {text.partition('=')[0]: text.partition('=')[2] for text in texts}
    if len(found) < len(texts):
        raise SettingsError(f'{option} gives a name twice in {", ".join(texts)}; leave one of them out')
    return found
