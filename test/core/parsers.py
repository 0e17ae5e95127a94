# SPDX-License-Identifier: Apache-2.0
"""Every command with its parser, and the options of each."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from rmuscle_core.cli import COMMANDS, build_parser


def leaves(words: tuple[str, ...], parser: argparse.ArgumentParser) -> Iterator[tuple[tuple[str, ...], object]]:
    below = next((a for a in parser._actions if isinstance(a, argparse._SubParsersAction)), None)
    if below is None:
        yield words, parser
    else:
        for name, inner in below.choices.items():
            if words or name in COMMANDS:
                yield from leaves((*words, name), inner)


def commands() -> list[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """(('library', 'build'), its parser), ...; each parser refuses as it does on the command line."""
    found = []
    for name in COMMANDS:
        top = build_parser(name)._actions[-1]
        found += leaves((name,), top.choices[name])
    return found


def options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """All but --help."""
    return [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]


def needed(parser: argparse.ArgumentParser, but: argparse.Action) -> list[argparse.Action]:
    """What has to be given besides one option: everything required, and the first of a group of which one is."""
    given = [action for action in options(parser) if action.required and action is not but]
    for group in parser._mutually_exclusive_groups:
        if group.required and but not in group._group_actions:
            given.append(group._group_actions[0])
    return given
