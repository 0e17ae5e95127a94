# SPDX-License-Identifier: Apache-2.0
"""Choosing settings from recordings: the sweep on a real tiny policy, the choice on numbers made by hand."""

import json
from dataclasses import replace

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
def record(look, tmp_path, monkeypatch):
    """record(observations of each episode): a recording, to be tuned on a small grid."""
    monkeypatch.setattr(sweeping, 'Grid', lambda *axes: Grid(*axes) if axes else GRID)

    def make(episodes):
        write_recording(tmp_path / 'recording.h5', [RecordedEpisode(f'run-{n}', True, episode)
                                                    for n, episode in enumerate(episodes)])
        return tmp_path / 'recording.h5'
    return make


@pytest.fixture
def alike(look):
    """alike(number): so many episodes of two calls that look alike."""
    return lambda number: [[look(seed=10 * n + i, place=i) for i in range(2)] for n in range(number)]


@pytest.fixture
def recording(record, alike):
    return record(alike(6))


def tune(recording, checkpoint, *arguments):
    out = recording.parent / 'tuned'
    code = main(['tune', str(recording), '--checkpoint', str(checkpoint), '--out', str(out), *arguments])
    return code, json.loads((out / 'tune.json').read_text()), yaml.safe_load((out / 'tuned.yaml').read_text())


def test_a_generous_budget_takes_the_cheapest_and_none_takes_dense(recording, tiny_checkpoint):
    from rmuscle_core.importing.robot import read_settings
    from rmuscle_core.settings import Settings

    code, found, parameters = tune(recording, tiny_checkpoint, '--budget', '10', '--predict', 'thor')
    assert code == 0 and found['neuron_ratio'] == 0.5 and found['speedup'] > 1
    assert found['cost'] == 'predicted for Jetson AGX Thor' and 0 < found['held_out_error'] <= 10
    assert found['cautions'] == []
    assert parameters['/**']['ros__parameters']['token_ratio'] == found['token_ratio']
    settings = Settings().with_values(**read_settings(recording.parent / 'tuned' / 'tuned.yaml'))
    assert (settings.token_ratio, settings.neuron_ratio, settings.profile) == (found['token_ratio'], 0.5, 'custom')
    code, found, _ = tune(recording, tiny_checkpoint, '--budget', '1e-9')
    assert code == 0 and (found['token_ratio'], found['neuron_ratio']) == (1, 1) and found['error'] == 0


def test_errors_are_those_of_the_policy_itself(recording, tiny_checkpoint):
    """The sweep takes short cuts; at one setting it must agree with a replay, which takes none."""
    _, found, _ = tune(recording, tiny_checkpoint, '--budget', '10', '--predict', 'h200')
    out = recording.parent / 'replayed'
    main(['replay', str(recording), '--checkpoint', str(tiny_checkpoint), '--out', str(out), '--token-ratio', '0.2',
          '--neuron-ratio', '0.5', '--reference-source', 'library'])
    replayed = json.loads((out / 'report.json').read_text())
    assert replayed['paths'] == {'library': replayed['calls']} and replayed['calls'] == found['calls'] + 2
    chosen_on = [row['difference'] for row in replayed['by_episode'] if row['episode'] in ('run-3', 'run-5')]
    assert np.mean(chosen_on) == pytest.approx(found['errors'][1][0][0], rel=0.01)


def test_a_choice_that_fails_on_held_out_episodes_is_exit_code_1(record, alike, look, tiny_checkpoint, capsys):
    """The episodes that choose look like the references, run-4 that checks only by half."""
    episodes = alike(6)
    episodes[4] = [half_of(look(seed=90 + i, place=i), look(place=7 + i)) for i in range(2)]
    recording = record(episodes)
    code, free, _ = tune(recording, tiny_checkpoint, '--budget', '10', '--predict', 'thor')
    assert code == 0 and free['held_out_error'] > free['bound'] > 0
    budget = (free['held_out_error'] + free['bound']) / 2
    code, found, parameters = tune(recording, tiny_checkpoint, '--budget', str(budget), '--predict', 'thor')
    assert code == 1 and found['held_out_error'] > budget > found['bound']
    assert found['token_ratio'] == parameters['/**']['ros__parameters']['token_ratio'] == free['token_ratio']
    assert f'held out {found["held_out_error"]:.4f}, budget {budget:g}' in capsys.readouterr().out


def half_of(one, other):
    """An observation whose lower half of each picture is another's."""
    images = {camera: np.concatenate([picture[:16], other.images[camera][16:]])
              for camera, picture in one.images.items()}
    return replace(one, images=images)


def test_one_episode_is_refused(record, alike, tiny_checkpoint, capsys):
    recording = record(alike(1))
    out = recording.parent / 'o'
    assert main(['tune', str(recording), '--checkpoint', str(tiny_checkpoint), '--out', str(out)]) == 3
    assert 'found 1 episodes, expected two at least' in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(('number', 'caution'), [(2, 'nothing was held out'), (3, 'one episode alone chose'), (5, '')])
def test_too_few_episodes_to_be_sure_are_said(record, alike, tiny_checkpoint, number, caution, capsys):
    recording = record(alike(number))
    code, found, _ = tune(recording, tiny_checkpoint, '--budget', '10', '--predict', 'thor')
    assert code == 0 and (found['held_out_error'] is None) == (number == 2)
    assert ('held out: nothing' in (recording.parent / 'tuned/tuned.yaml').read_text()) == (number == 2)
    assert [said.startswith(caution) for said in found['cautions']] == ([True] if caution else [])
    assert (f'caution: {caution}' in capsys.readouterr().out) == bool(caution)


def test_episodes_that_do_not_fit_are_left_out(record, alike, tiny_checkpoint, capsys):
    """A state of other length: among the references, and among those tried; then nothing but such."""
    episodes = alike(6)
    wrong = [[replace(o, state=o.state[:3]) for o in episode] for episode in episodes]
    recording = record([wrong[0], *episodes[1:5], wrong[5]])
    code, *_ = tune(recording, tiny_checkpoint, '--budget', '10', '--predict', 'thor')
    said = capsys.readouterr().out
    assert code == 0 and 'run-0 was skipped: ' in said and 'run-5 was skipped: ' in said
    recording = record([*wrong[:3], *episodes[3:]])
    out = recording.parent / 'o'
    assert main(['tune', str(recording), '--checkpoint', str(tiny_checkpoint), '--out', str(out)]) == 3
    assert 'none of the 3 episodes that come first can serve as reference (run-0: ' in capsys.readouterr().err


def by_hand(errors, milliseconds):
    errors = np.array(errors, float)[:, None]
    return Sweep(Grid((0.2, 1.0), (0.5, 1.0), (0,)), errors, np.array(milliseconds, float)[None],
                 np.arange(len(errors)), np.array([0.9]), 10.0)


def test_the_choice_is_the_cheapest_whose_bound_keeps_the_budget():
    found = by_hand([[[0.10, 0.01], [0.02, 0.0]], [[0.30, 0.01], [0.02, 0.0]]], [[1, 4], [3, 10]])
    error, bound = bounds(found)
    assert error[0, 0, 0] == pytest.approx(0.2) and bound[0, 0, 0] == pytest.approx(0.2 + 1.645 * 0.1)
    assert (choose(found, 0.5).token_ratio, choose(found, 0.5).neuron_ratio) == (0.2, 0.5)
    assert (choose(found, 0.25).token_ratio, choose(found, 0.25).neuron_ratio) == (1.0, 0.5)
    assert choose(found, 0.0).milliseconds == 10
    assert pareto(found.milliseconds[0], error[0]) == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_one_episode_proves_little():
    found = by_hand([[[0.1, 0.0], [0.0, 0.0]]], [[1, 4], [3, 10]])
    assert bounds(found)[1][0, 0, 0] == pytest.approx(0.1 * 2.645)


def test_a_budget_nobody_keeps_is_one_sentence():
    found = by_hand([[[0.1, 0.1], [0.1, 0.1]], [[0.1, 0.1], [0.1, 0.1]]], [[1, 4], [3, 10]])
    with pytest.raises(SettingsError, match=r'below 0\.05 .*0\.1000'):
        choose(found, 0.05)
