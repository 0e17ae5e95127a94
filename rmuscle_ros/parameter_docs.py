# SPDX-License-Identifier: Apache-2.0
"""docs/parameters.md from the two tables that declare the parameters.

    python -m rmuscle_ros.parameter_docs > docs/parameters.md
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import Field, fields

from rmuscle_core.settings import PROFILES, rows
from rmuscle_ros.params import NodeSettings

INTRODUCTION = """\
# Parameters of policy_node

Made from the tables in `rmuscle_core/settings.py` and `rmuscle_ros/params.py` by
`python -m rmuscle_ros.parameter_docs > docs/parameters.md`; do not edit.

A parameter that takes effect at the next policy call can be changed while the robot works
(`ros2 param set /policy_node token_ratio 0.4`); one that takes effect at configure is refused until the node is cleaned
up.
Integers are taken for numbers. The same settings are options of the command-line tools (`--token-ratio 0.4`).

"""


def markdown() -> str:
    """The whole page."""
    profiles = ['## Profiles', '', '| profile | token_ratio | neuron_ratio |', '|---|---|---|',
                *(f'| {name} | {tokens:g} | {neurons:g} |' for name, (tokens, neurons) in PROFILES.items())]
    return INTRODUCTION + '\n'.join([*_table('Policy calls and their caches', rows()), '', *profiles, '',
                                     *_table('The node', fields(NodeSettings))]) + '\n'


def _table(title: str, table: Iterable[Field]) -> list[str]:
    head = [f'## {title}', '', '| parameter | default | allowed | takes effect | what it is |', '|---|---|---|---|---|']
    return head + [f'| `{row.name}` | {_value(row.default)} | {_allowed(row)} | {row.metadata["effect"]} | '
                   f'{row.metadata["description"]} |' for row in table]


def _value(default: object) -> str:
    if isinstance(default, tuple):
        values = [v for v in default if v != '']
        return '`[' + ', '.join(str(v) for v in values) + ']`'
    return f'`{default}`' if default != '' else ''


def _allowed(row: Field) -> str:
    meta = row.metadata
    unit = f' {meta["unit"]}' if meta['unit'] else ''
    if meta['choices']:
        return ', '.join(meta['choices'])
    if meta['low'] is None or math.isinf(meta['low']):
        return unit.strip()
    return f'{meta["low"]:g} to {meta["high"]:g}{unit}'


if __name__ == '__main__':
    print(markdown(), end='')
