# SPDX-License-Identifier: Apache-2.0
"""The simulated cell's episodes, by three ways into a library of the shipped policy: all three hold the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from recorded_sources import messages_of, write_bag, write_dataset

from rmuscle_core.cli import main
from rmuscle_core.library.recording import RecordedEpisode, write_recording
from rmuscle_core.model import load_config
from rmuscle_core.observation import Observation

CONFIG = Path(__file__).resolve().parents[3] / 'config'
CHECKPOINT, PARAMETERS = CONFIG / 'policy/transfer_cube', CONFIG / 'workcell.yaml'
STEPS = 30  # of each episode, 1.2 s


@pytest.fixture(scope='module')
def executions():
    """What the cell's cameras and joints showed at every control step of two of the expert's executions."""
    cell_module = pytest.importorskip('rmuscle_core.workcell.cell', reason='the extra "workcell" is not installed',
                                      exc_type=ModuleNotFoundError)
    from rmuscle_core.workcell.expert import plan
    try:
        cell = cell_module.WorkCell()
    except Exception as error:  # noqa: BLE001 - every GL backend fails with a type of its own
        pytest.skip(f'no off-screen rendering on this machine ({error}); install libosmesa6')
    found = []
    for seed in (1, 2):
        cell.reset(seed)
        found.append([])
        for step, command in enumerate(plan(cell)[:STEPS]):
            found[-1].append(Observation(cell.images(), cell.state(), cell.task, step / cell.control_rate))
            cell.step(command)
    cell.close()
    return found, cell_module.JOINTS, cell_module.CONTROL_RATE


def test_recording_dataset_and_bags_of_the_same_executions(executions, tmp_path, contents):
    episodes, joints, rate = executions
    every = load_config(CHECKPOINT).execute_steps
    write_recording(tmp_path / 'recording.h5', [RecordedEpisode(f'episode-{number}', True, episode[::every])
                                                for number, episode in enumerate(episodes)], joints)
    write_dataset(tmp_path / 'dataset', episodes, rate)
    (tmp_path / 'bags').mkdir()
    for number, episode in enumerate(episodes):
        write_bag(tmp_path / f'bags/episode-{number}', messages_of(episode, joints))
    libraries = []
    for source in ('recording.h5', 'dataset', 'bags'):
        options = ['--checkpoint', CHECKPOINT, '--episodes', tmp_path / source, '--out', tmp_path / f'{source} library',
                   '--parameters', PARAMETERS]
        assert main(['library', 'build', *map(str, options)]) == 0
        libraries.append(contents(tmp_path / f'{source} library'))
    assert [len(calls) for _, _, calls in libraries[0]] == [3, 3]
    assert libraries[1] == libraries[0] and libraries[2] == libraries[0]
