# SPDX-License-Identifier: Apache-2.0
"""Choosing settings from recordings: the sweep on a real tiny policy, the choice on numbers made by hand."""

import json

import numpy as np
import pytest
import yaml

from rmuscle_core.cli import main
from rmuscle_core.errors import SettingsError
from rmuscle_core.library.recording import RecordedEpisode, write_recording
from rmuscle_core.tuning import sweep as sweeping
from rmuscle_core.tuning.choose import bounds, choose, pareto
from rmuscle_core.tuning.sweep import Grid, Sweep

GRID = Grid((0.2, 1.0), (0.5, 1.0), (0, 1))


@pytest.fixture
def recording(look, tmp_path, monkeypatch):
    episodes = [RecordedEpisode(f'run-{n}', True, [look(seed=10 * n + i, place=i) for i in range(2)]) for n in range(6)]
    write_recording(tmp_path / 'recording.h5', episodes)
    monkeypatch.setattr(sweeping, 'Grid', lambda: GRID)
    return tmp_path / 'recording.h5'


def tune(recording, checkpoint, *arguments):
    out = recording.parent / 'tuned'
    code = main(['tune', str(recording), '--checkpoint', str(checkpoint), '--out', str(out), *arguments])
    return code, json.loads((out / 'tune.json').read_text()), yaml.safe_load((out / 'tuned.yaml').read_text())


def test_a_generous_budget_takes_the_cheapest_and_none_takes_dense(recording, tiny_checkpoint):
    from rmuscle_core.importing.robot import read_settings
    from rmuscle_core.settings import Settings

    code, found, parameters = tune(recording, tiny_checkpoint, '--budget', '10', '--predict', 'h200')
    assert code == 0 and found['neuron_ratio'] == 0.5 and found['speedup'] > 1
    assert found['cost'] == 'predicted for H200' and found['held_out_error'] <= 10
    assert parameters['/**']['ros__parameters']['token_ratio'] == found['token_ratio']
    settings = Settings().with_values(**read_settings(recording.parent / 'tuned' / 'tuned.yaml'))
    assert (settings.token_ratio, settings.neuron_ratio, settings.profile) == (found['token_ratio'], 0.5, 'custom')
    code, found, _ = tune(recording, tiny_checkpoint, '--budget', '0')
    assert code == 0 and (found['token_ratio'], found['neuron_ratio']) == (1, 1) and found['error'] == 0


def test_errors_are_those_of_the_policy_itself(recording, tiny_checkpoint):
    """The sweep takes short cuts; at one setting it must agree with a replay, which takes none."""
    _, found, _ = tune(recording, tiny_checkpoint, '--budget', '10', '--predict', 'h200')
    out = recording.parent / 'replayed'
    main(['replay', str(recording), '--checkpoint', str(tiny_checkpoint), '--out', str(out), '--token-ratio', '0.2',
          '--neuron-ratio', '0.5', '--reference-source', 'library'])
    replayed = json.loads((out / 'report.json').read_text())
    assert replayed['paths'] == {'library': replayed['calls']} and replayed['calls'] == found['calls']
    swept = found['errors'][1][0][0]  # of the episodes it chose on, which resemble the others
    assert replayed['action_difference']['mean'] == pytest.approx(swept, rel=0.5)


def by_hand(errors, milliseconds):
    errors = np.array(errors, float)[:, None]
    return Sweep(Grid((0.2, 1.0), (0.5, 1.0), (0,)), errors, np.array(milliseconds, float)[None],
                 np.arange(len(errors)), np.array([0.9]), 10.0)


def test_the_choice_is_the_cheapest_whose_bound_keeps_the_budget():
    found = by_hand([[[0.10, 0.01], [0.02, 0.0]], [[0.30, 0.01], [0.02, 0.0]]], [[1, 4], [3, 10]])
    everyone = np.array([True, True])
    error, bound = bounds(found, everyone)
    assert error[0, 0, 0] == pytest.approx(0.2) and bound[0, 0, 0] == pytest.approx(0.2 + 1.645 * 0.1)
    assert (choose(found, everyone, 0.5).token_ratio, choose(found, everyone, 0.5).neuron_ratio) == (0.2, 0.5)
    assert (choose(found, everyone, 0.25).token_ratio, choose(found, everyone, 0.25).neuron_ratio) == (1.0, 0.5)
    assert choose(found, everyone, 0.0).milliseconds == 10
    assert pareto(found.milliseconds[0], error[0]) == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_one_episode_proves_little():
    found = by_hand([[[0.1, 0.0], [0.0, 0.0]]], [[1, 4], [3, 10]])
    assert bounds(found, np.array([True]))[1][0, 0, 0] == pytest.approx(0.1 * 2.645)


def test_a_budget_nobody_keeps_is_one_sentence():
    found = by_hand([[[0.1, 0.1], [0.1, 0.1]], [[0.1, 0.1], [0.1, 0.1]]], [[1, 4], [3, 10]])
    with pytest.raises(SettingsError, match=r'below 0\.05 .*0\.1000'):
        choose(found, np.array([True, True]), 0.05)
