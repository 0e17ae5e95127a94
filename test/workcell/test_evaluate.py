# SPDX-License-Identifier: Apache-2.0
"""Closed-loop evaluation."""

from __future__ import annotations

import argparse
import json

import numpy as np
import pytest

from rmuscle_core.cli import main
from rmuscle_core.errors import ObservationError
from rmuscle_core.workcell import train


@pytest.fixture(scope='module')
def checkpoint(cell, tmp_path_factory):
    """A policy of the right shape that has learnt next to nothing."""
    from rmuscle_core.workcell.demonstrations import record
    from rmuscle_core.workcell.expert import TransferTeacher

    directory = tmp_path_factory.mktemp('policy') / 'checkpoint'
    made = record(TransferTeacher(cell), episodes=1, located=4, seed=0, every=20)
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    args = parser.parse_args(['--data', 'unused', '--out', str(directory), '--device', 'cpu', '--batch', '1',
                              '--steps', '1', '--scale', '0.1', '--repeats', '1'])
    train.Trainer(made, train.policy_config(made, args.scale), args).run()
    return directory


@pytest.fixture
def policy(checkpoint):
    from rmuscle_core.policy import MusclePolicy
    from rmuscle_core.settings import Settings

    loaded = MusclePolicy.load(checkpoint, Settings(mode='dense'))
    yield loaded
    loaded.close()


def test_an_episode(cell, policy, monkeypatch):
    from rmuscle_core.workcell import evaluate

    monkeypatch.setattr(type(cell), 'episode_steps', 30)
    live, = evaluate.run_episodes(cell, policy, [7], execute=12)
    assert live.steps == 30 and len(live.observations) == len(live.reports) == 3
    assert [observation.stamp_s for observation in live.observations] == pytest.approx([0, 0.48, 0.96])
    assert not np.array_equal(live.observations[0].images['top'], live.observations[2].images['top'])
    assert {report.path for report in live.reports} == {'dense'}

    shown = evaluate.run_episodes(cell, policy, [7, 8], execute=12, frozen=True)
    for episode in shown:
        for observation in episode.observations:
            assert np.array_equal(observation.images['top'], live.observations[0].images['top'])


def test_an_expert_in_place_of_the_network_succeeds(cell, policy, monkeypatch):
    """The loop itself loses nothing: with the expert's commands as chunks it counts a success."""
    from rmuscle_core.observation import ActionChunk, CallReport
    from rmuscle_core.workcell import evaluate
    from rmuscle_core.workcell.expert import plan

    def infer(observation):
        step = round(observation.stamp_s * cell.control_rate)
        if step == 0:
            infer.commands = plan(cell)
        return ActionChunk(infer.commands[step:step + 16], CallReport(milliseconds={'total': 1.0}))

    monkeypatch.setattr(policy, 'infer', infer)
    result = evaluate.summary(evaluate.run_episodes(cell, policy, [0, 5], execute=11))
    assert result['successes'] == 2 and result['failed_seeds'] == []
    assert 7 <= result['calls_per_episode'] <= 10 and policy.execute_steps == 11


@pytest.mark.parametrize('execute', [0, 17])
def test_a_chunk_cannot_be_executed_further_than_it_goes(cell, policy, execute):
    from rmuscle_core.workcell.evaluate import run_episodes

    with pytest.raises(ObservationError, match='choose 1 to 16'):
        run_episodes(cell, policy, [0], execute)


def test_a_checkpoint_of_another_robot_is_refused(cell, policy, monkeypatch):
    from dataclasses import replace

    from rmuscle_core.workcell.evaluate import run_episodes

    monkeypatch.setattr(policy, 'config', replace(policy.config, cameras=('base_0_rgb',)))
    with pytest.raises(ObservationError, match='base_0_rgb'):
        run_episodes(cell, policy, [0], 12)


def test_the_commands_from_demonstrations_to_a_result(cell, checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(type(cell), 'episode_steps', 12)
    data = tmp_path / 'demos.npz'
    assert main(['workcell', 'demos', '--episodes', '1', '--located', '10', '--every', '20', '--out', str(data)]) == 0
    assert main(['workcell', 'train', '--data', str(data), '--out', str(tmp_path / 'policy'), '--device', 'cpu',
                 '--steps', '1', '--batch', '2', '--scale', '0.1']) == 0
    capsys.readouterr()
    assert main(['workcell', 'evaluate', '--checkpoint', str(tmp_path / 'policy'), '--episodes', '2', '--json',
                 '--record', str(tmp_path / 'recording.h5')]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result['episodes'] == 2 and result['paths'] == {'dense': 2} and result['calls_per_episode'] == 1
    assert (tmp_path / 'recording.h5').is_file()


def test_recordings_hold_the_successful_episodes(cell, policy, tmp_path, monkeypatch):
    from dataclasses import replace

    from rmuscle_core.library.recording import open_recording
    from rmuscle_core.workcell import commands, evaluate

    monkeypatch.setattr(type(cell), 'episode_steps', 24)
    first, second = evaluate.run_episodes(cell, policy, [3, 4], execute=12)
    commands.record(tmp_path / 'recording.h5', [first, replace(second, success=True)], cell.joints)
    with open_recording(tmp_path / 'recording.h5') as recording:
        episode, = list(recording)
        assert recording.joints == cell.joints
    assert episode.name == 'seed-4' and episode.success and len(episode.observations) == 2
    assert np.array_equal(episode.observations[1].images['left_wrist'], second.observations[1].images['left_wrist'])
