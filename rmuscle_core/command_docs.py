# SPDX-License-Identifier: Apache-2.0
"""docs/cli.md from the parsers of the commands, without argparse's own layout, which differs between Python versions.

    python -m rmuscle_core.command_docs > docs/cli.md
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from rmuscle_core.cli import COMMANDS, build_parser

INTRODUCTION = """\
# Command line

Made from the parsers by `python -m rmuscle_core.command_docs > docs/cli.md`; do not edit.

`rmuscle COMMAND --help` shows the same. A refusal is one sentence on stderr: what was expected, what was found, what to
do. Only the packages of the command that runs are imported.

"""
SETTINGS = 'settings'  # the group that docs/parameters.md explains
ADDED = ' (default: %(default)s)'  # by argparse to options that have a --no- form, up to Python 3.12


def commands() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command that can be given, with its parser: 'library build', ..."""
    for name in COMMANDS:
        yield from _leaves(name, _subparsers(build_parser(name))[name])


def markdown() -> str:
    """The whole page."""
    top, printed = build_parser(), {}
    listed = [f'| {_link(name)} | {_purpose(name)} |' for name, _ in commands()]
    lines = ['| command | |', '|---|---|', *listed, '', *_block(top.epilog)]
    for name, parser in commands():
        lines += [f'## rmuscle {name}', '', *_paragraph(parser.description), *_block(parser.epilog)]
        plain = [action for group in parser._action_groups[:2] for action in group._group_actions]  # argparse's own two
        lines += [*_table(_rows(plain)), *_alternatives(parser)]
        for group in parser._action_groups[2:]:
            lines += _group(name, group, printed)
    return INTRODUCTION + '\n'.join(lines).rstrip() + '\n'


def _group(command: str, group: argparse._ArgumentGroup, printed: dict[tuple[str, ...], str]) -> list[str]:
    """A table of options under its title; one that an earlier command has as well is a link to it."""
    if group.title == SETTINGS:
        return ['Settings of the policy: `--token-ratio 0.4` and so on for every row of '
                '[parameters](parameters.md#policy-calls-and-their-caches).', '']
    rows = _rows(group._group_actions)
    if rows in printed:
        return [f'{group.title.capitalize()}: as for {_link(printed[rows])}.', '']
    printed[rows] = command
    return [f'{group.title.capitalize()}:', '', *_table(rows)]


def _rows(actions: list[argparse.Action]) -> tuple[str, ...]:
    return tuple(table_row(action) for action in actions if not isinstance(action, argparse._HelpAction))


def _table(rows: tuple[str, ...]) -> list[str]:
    return ['| option | value | |', '|---|---|---|', *rows, '']


def _alternatives(parser: argparse.ArgumentParser) -> list[str]:
    """Which options exclude each other."""
    return [line for group in parser._mutually_exclusive_groups for line in (
        f'{"Exactly" if group.required else "At most"} one of '
        f'{", ".join(f"`{action.option_strings[0]}`" for action in group._group_actions)}.', '')]


def _link(name: str) -> str:
    return f'[`rmuscle {name}`](#rmuscle-{name.replace(" ", "-")})'


def table_row(action: argparse.Action) -> str:
    """One line of a table of options: names, what follows them, what they do."""
    names = ', '.join(f'`{name}`' for name in action.option_strings) or f'`{(action.metavar or action.dest).upper()}`'
    help_text = action.help or ''
    if isinstance(action, argparse.BooleanOptionalAction):
        help_text = help_text.removesuffix(ADDED)
    text = help_text % {**vars(action), 'prog': 'rmuscle'}
    required = 'required; ' if action.required and action.option_strings else ''
    return f'| {names} | {_value(action)} | {_cell(required + text)} |'


def _value(action: argparse.Action) -> str:
    """What follows the option: its choices or the name of its value; nothing for a flag."""
    if action.nargs == 0 or not action.option_strings:
        return ''
    choices = [str(choice) for choice in action.choices or ()]
    value = ', '.join(choices) or str(action.metavar or action.dest.upper())
    return _cell(value + (' ...' if action.nargs == '+' else ''))


def _cell(text: str) -> str:
    return ' '.join(text.split()).replace('|', '\\|')


def _paragraph(text: str | None) -> list[str]:
    return [' '.join(text.split()), ''] if text else []


def _block(text: str | None) -> list[str]:
    return ['```text', text, '```', ''] if text else []


def _purpose(name: str) -> str:
    """The line that the help of the command above shows for it."""
    first, _, rest = name.partition(' ')
    parser = build_parser(first)
    if rest:
        parser = _subparsers(parser)[first]
    actions = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))._choices_actions
    return next(action.help for action in actions if action.dest == (rest or first))


def _leaves(name: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    children = _subparsers(parser)
    if not children:
        yield name, parser
    for child, its in children.items():
        yield from _leaves(f'{name} {child}', its)


def _subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    return next((action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)), {})


if __name__ == '__main__':
    print(markdown(), end='')
