# SPDX-License-Identifier: Apache-2.0
"""Tables and progress, in a terminal and anywhere else."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import rmuscle_core
from rmuscle_core.bench import report

COLUMNS = ['', *(f'column number {number}' for number in range(12))]
ROWS = [[f'row of a long name {number}', *(f'value {number}/{column} with its interval' for column in range(12))]
        for number in range(3)]


def test_a_piped_table_has_one_line_for_each_row_and_cuts_no_cell(capsys):
    report.print_table('title', COLUMNS, ROWS)
    out = capsys.readouterr().out
    for row in ROWS:
        assert any(all(cell in line for cell in row) for line in out.splitlines())
    assert all(column in out for column in COLUMNS) and '\u2026' not in out


def test_a_narrow_terminal_gets_every_character(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, 'isatty', lambda: True)
    monkeypatch.setenv('COLUMNS', '60')
    report.print_table('title', ['', 'success', '95 %'], [['a name that is long indeed', 'x' * 40, '1234567890 ' * 4]])
    out = re.sub(r'\x1b\[\d+m', '', capsys.readouterr().out)
    assert out.count('x') == 40 and out.count('1234567890') == 4 and '\u2026' not in out
    assert max(map(len, out.splitlines())) <= 60


def test_progress_is_a_line_now_and_then_where_nobody_sees_a_bar(capsys, monkeypatch):
    monkeypatch.setattr(report, 'EVERY_S', 0.0)
    with report.progress_bar() as bar:
        counted, open_end = bar.add_task('episodes', total=3), bar.add_task('calls', total=None)
        bar.advance(counted)
        bar.update(counted, completed=2, total=4)
        bar.advance(open_end)
    out, err = capsys.readouterr()
    assert out == '' and [line.rpartition(',')[0] for line in err.splitlines()] == [
        'episodes: 1 of 3', 'episodes: 2 of 4', 'calls: 1']


def test_quick_work_says_nothing(capsys, monkeypatch):
    monkeypatch.setattr(report, 'EVERY_S', 1e9)
    with report.progress_bar() as bar:
        bar.advance(bar.add_task('episodes', total=1))
    assert capsys.readouterr() == ('', '')


@pytest.mark.parametrize('library', ['rich.progress', 'tqdm'])
def test_every_bar_is_this_one(library):
    modules = Path(rmuscle_core.__file__).parent.rglob('*.py')
    assert [path.name for path in modules if library in path.read_text()] == ['report.py'] * (library != 'tqdm')
