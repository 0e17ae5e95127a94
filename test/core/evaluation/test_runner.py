# SPDX-License-Identifier: Apache-2.0
"""A run over rows and seeds: resumed, kept apart from the library's seeds, summarised. The cell is a toy; the policy,
its library and its engines are real."""

import json
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny_policy import CAMERAS, JOINTS, PROMPT

from rmuscle_core.cli import main
from rmuscle_core.errors import RMuscleError
from rmuscle_core.evaluation import runner, table
from rmuscle_core.evaluation.rows import BY_NAME, QUICK, ROWS
from rmuscle_core.settings import Settings
from rmuscle_core.workcell import tasks


class ToyCell:
    """Goes where it is told; even seeds succeed after eight steps."""

    task, cameras, joints, control_rate, episode_steps = PROMPT, CAMERAS, tuple('abcde'), 10.0, 12

    def reset(self, seed):
        self.seed, self.done = seed, 0
        self.position = np.random.default_rng(seed).uniform(-0.3, 0.3, JOINTS).astype(np.float32)

    def state(self):
        return self.position.copy()

    def images(self):
        return {camera: np.random.default_rng(self.seed % 3).integers(0, 255, (32, 32, 3)).astype(np.uint8)
                for camera in CAMERAS}

    def step(self, command):
        self.position = 0.9 * self.position + 0.1 * np.clip(command, -1, 1).astype(np.float32)
        self.done += 1
        return self.seed % 2 == 0 and self.done == 8

    def close(self):
        pass


@pytest.fixture
def plan(tiny_checkpoint, tmp_path, monkeypatch):
    toy = replace(tasks.TASKS['transfer_cube'], policy='none', make_cell=lambda pixels: ToyCell())
    monkeypatch.setitem(tasks.TASKS, 'toy', toy)
    for row in ROWS:  # two episodes are enough for a library here
        monkeypatch.setitem(BY_NAME, row.name, replace(row, episodes=2))
    return runner.Plan('toy', Path(tiny_checkpoint), tmp_path, errors=1)


def rows(*names):
    return [BY_NAME[name] for name in names]


def test_every_row_is_valid_and_named_once():
    assert len(BY_NAME) == len(ROWS)
    for row in ROWS:
        Settings().with_values(**row.settings)


def test_a_run_is_resumed_and_summarised(plan, capsys):
    chosen, done = rows('dense', 'default', 'frozen_images'), []
    lines = runner.evaluate(plan, chosen, [10, 11], 1, lambda *progress: done.append(progress))
    assert [(line['row'], line['seed'], line['success']) for line in lines] == [
        (name, seed, seed == 10) for name in ('dense', 'default', 'frozen_images') for seed in (10, 11)]
    assert done[0] == (0, 6) and done[-1] == (6, 6)
    assert lines[2]['paths'].get('library') and lines[0]['paths'] == {'dense': 2}
    assert lines[0]['error'] == pytest.approx(0, abs=1e-6) and lines[2]['error'] > 0 and lines[1]['error'] is None

    kept = plan.results.read_text()
    plan.results.write_text(kept[:kept.rindex('{') + 20])  # killed while writing the last line
    again = runner.evaluate(plan, chosen, [10, 11], 1, lambda *progress: done.append(progress))
    assert done[-2:] == [(5, 6), (6, 6)] or done[-1] == (6, 6)
    assert [line['success'] for line in again] == [line['success'] for line in lines]

    summary = table.summarise(again)
    assert summary['dense']['successes'] == 1 and summary['dense']['failed_seeds'] == [11]
    assert summary['default']['p'] == 1 and summary['default']['difference'][0] == 0
    table.show('toy', summary)
    assert '1 of 2' in capsys.readouterr().out


def test_every_row_runs(plan):
    threads = set(threading.enumerate())
    lines = runner.evaluate(plan, [BY_NAME[row.name] for row in ROWS], [10], 1)
    assert [line['row'] for line in lines] == [row.name for row in ROWS]
    assert all(line['success'] for line in lines)
    assert set(threading.enumerate()) <= threads  # no policy is left running


def test_a_library_never_holds_a_tested_seed(plan):
    with pytest.raises(RMuscleError, match='seed 5003'):
        runner.evaluate(plan, rows('dense'), [5003], 1)


def test_results_of_another_run_are_left_alone(plan):
    runner.evaluate(plan, rows('dense'), [10], 1)
    before = plan.results.read_text()
    with pytest.raises(RMuscleError, match=r'episodes\.jsonl holds a run with other library_seed than this one'):
        runner.evaluate(replace(plan, library_seed=6000), rows('dense'), [10], 1)
    assert plan.results.read_text() == before


def test_a_results_file_that_is_none_is_named(plan):
    plan.results.write_text('{"row": 1\n{}\n')
    with pytest.raises(RMuscleError, match=r'line 1 of .*episodes\.jsonl'):
        runner.evaluate(plan, rows('dense'), [10], 1)


def test_the_command_writes_a_summary(plan, tmp_path):
    out = tmp_path / 'deep' / 'summary.json'
    assert main(['eval', '--task', 'toy', '--checkpoint', str(plan.checkpoint), '--rows', 'default', '--episodes', '2',
                 '--out', str(tmp_path), '--processes', '1', '--json', str(out)]) == 0
    found = json.loads(out.read_text())
    assert list(found['rows']) == ['dense', 'default'] and found['seeds'] == [1000, 1001]


def test_the_list_names_every_row_and_all_that_it_sets(capsys):
    assert main(['eval', '--list']) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [row.name for row in ROWS]
    for line, row in zip(lines, ROWS):
        assert row.note in line and all(f'{name} {value}' in line for name, value in row.settings.items())


def test_rows_are_named_or_the_quick_ones(capsys):
    assert main(['eval', '--quick', '--list']) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(QUICK)
    assert main(['eval', '--quick', '--rows', 'dense']) == 2 and 'not allowed with' in capsys.readouterr().err


@pytest.mark.parametrize(('arguments', 'text'), [(['--rows', 'nope'], "no row 'nope'"),
                                                 (['--task', 'nope'], "no task 'nope'")])
def test_what_does_not_exist_is_named(arguments, text, capsys):
    assert main(['eval', *arguments]) == 2
    assert text in capsys.readouterr().err


def test_path_similarity_is_one_for_the_same_path_and_none_without_motion():
    path = np.random.default_rng(0).normal(size=(6, 3))
    assert table.path_similarity(path, path[:4]) == pytest.approx(1)
    assert table.path_similarity(path, 2 * path[0] - path) == pytest.approx(-1)
    assert table.path_similarity(path[:1], path) is None
