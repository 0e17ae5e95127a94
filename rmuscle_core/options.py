# SPDX-License-Identifier: Apache-2.0
"""Command-line options that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rmuscle_core.errors import SettingsError
from rmuscle_core.settings import rows


def add_settings(parser: argparse.ArgumentParser) -> None:
    """One option for every row of the settings table; what is not given is None."""
    group = parser.add_argument_group('settings', 'as in docs/parameters.md')
    for row in rows():
        group.add_argument(f'--{row.name.replace("_", "-")}', type=type(row.default), help=row.metadata['description'],
                           metavar='|'.join(row.metadata['choices']) or type(row.default).__name__)


def given_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given, for ``Settings.with_values``."""
    return {row.name: getattr(args, row.name) for row in rows() if getattr(args, row.name) is not None}


def check_library(path: Path | None) -> None:
    """Raise SettingsError for a library that is not there: a mistyped path must not become an empty one."""
    if path is not None and not (path / 'library.json').is_file():
        raise SettingsError(f'there is no library at {path}; give the folder that "rmuscle library build" made')


def pairs(option: str, texts: Sequence[str]) -> dict[str, str]:
    """``NAME=VALUE`` texts of a repeated option as a dictionary; SettingsError for anything else."""
    for text in texts:
        if not all(text.partition('=')):
            raise SettingsError(f'{option} {text} must be two names with "=" between them')
    return {text.partition('=')[0]: text.partition('=')[2] for text in texts}
