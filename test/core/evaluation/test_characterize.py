# SPDX-License-Identifier: Apache-2.0
"""What repeated executions have in common: the measures by hand, and the command on a real tiny policy."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rmuscle_core.cli import main
from rmuscle_core.evaluation.characterize import CallStates, compare, path_cosines, yardstick
from rmuscle_core.library.recording import RecordedEpisode, write_recording

JOINTS = ('left_1', 'left_2', 'right_1', 'right_2', 'right_3')


def states(y, contribution):
    y = torch.tensor(y, dtype=torch.float32)[None, :, None]  # one layer, one feature
    contribution = torch.tensor(contribution, dtype=torch.float32)[None, None]
    return CallStates(torch.cat([y, torch.ones_like(y)], -1), y, contribution, torch.ones(2, 3))


def test_measures_by_hand():
    found = compare(states([1, 1, 1, 5], [4, 3, 2, 1]), states([1, 1, 2, 1], [1, 2, 3, 4]))
    # The token that changed most is one of four and has 4 of 5 of the output's change.
    assert found['output_change_covered'][1] == pytest.approx(0.8)
    assert found['contribution_covered'][-1] == pytest.approx(0.7)
    assert found['covered_by_reference'][-1] == pytest.approx(0.3) and found['mask_overlap'][-1] == 0
    assert found['ffn_output_cosine'] == pytest.approx(1) and found['ffn_input_cosine'][0] < 1
    assert found['action_cosine'] == pytest.approx(1)


def test_paths_are_told_by_arm():
    path = np.array([[1.0, 0, 0, 1, 0], [1, 0, 0, 1, 0]])
    other = np.array([[1.0, 0, 1, 0, 0]])  # shorter: only the calls that both have
    assert path_cosines(path, other, JOINTS) == pytest.approx({'left': 1, 'right': 0})
    assert path_cosines(path, other, ()) == pytest.approx({'arm': 0.5})


def test_the_yardstick_is_never_the_match():
    references = [[SimpleNamespace(number=n)] for n in range(3)]
    for matched in range(3):
        chosen = {yardstick(references, matched, number)[0].number for number in range(6)}
        assert chosen == {0, 1, 2} - {matched}


@pytest.fixture
def characterise(look, tmp_path, tiny_checkpoint):
    """characterise(places of each episode, success of each): exit code and the folder of the result."""
    def run(places, success=None, *options):
        episodes = [RecordedEpisode(f'run-{n}', success is None or success[n],
                                    [look(seed=10 * n + i, place=place) for i in range(2)])
                    for n, place in enumerate(places)]
        write_recording(tmp_path / 'recording.h5', episodes, JOINTS)
        return main(['characterize', '--checkpoint', str(tiny_checkpoint), '--episodes', str(tmp_path / 'recording.h5'),
                     '--out', str(tmp_path / 'out'), *options]), tmp_path / 'out'
    return run


def test_the_match_is_nearer_than_the_yardstick(characterise, capsys):
    """Each later episode looks as one of the earlier ones does, at the same place among them."""
    code, out = characterise([0, 1, 0, 1, 5], [True] * 4 + [False])
    found = json.loads((out / 'characterization.json').read_text())
    assert code == 0 and found['calls'] == 4 and found['reference_episodes'] == 2
    for name in ('ffn_input_cosine', 'ffn_output_cosine'):
        assert min(found['matched'][name]) > max(found['same_number'][name])
    assert found['matched']['mask_overlap'][0] > found['same_number']['mask_overlap'][0]
    assert found['path_cosine']['left'] > 0.98 and found['path_cosine']['right'] > 0.98
    assert (out / 'characterization.png').stat().st_size > 10_000
    said = capsys.readouterr().out
    assert 'run-4 was skipped: it did not succeed' in said and 'matched reference' in said


@pytest.mark.parametrize('places', [[0], [0, 0]])
def test_too_few_episodes_are_refused(characterise, places, capsys):
    code, out = characterise(places)
    assert code == 3 and not out.exists()
    assert f'{len(places)} usable episodes cannot be split into 2 references' in capsys.readouterr().err
