# SPDX-License-Identifier: Apache-2.0
from dataclasses import fields
from pathlib import Path

from rmuscle_core.settings import rows
from rmuscle_ros.parameter_docs import markdown
from rmuscle_ros.params import NodeSettings

PAGE = Path(__file__).resolve().parents[2] / 'docs' / 'parameters.md'


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == markdown(), 'run python -m rmuscle_ros.parameter_docs > docs/parameters.md'


def test_every_parameter_is_on_the_page():
    text = markdown()
    assert all(f'| `{row.name}` |' in text for row in [*rows(), *fields(NodeSettings)])
