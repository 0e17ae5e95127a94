# SPDX-License-Identifier: Apache-2.0
"""``rmuscle library`` with a small random policy: build, look, check, and the exit codes."""

import json
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from rmuscle_core.cli import main
from rmuscle_core.errors import LibraryError
from rmuscle_core.library import EpisodeLibrary
from rmuscle_core.library.recording import RecordedEpisode, write_recording
from rmuscle_core.model import VLA, ModelConfig, TransformerConfig, VisionConfig, save_checkpoint
from rmuscle_core.observation import Observation
from rmuscle_core.policy import MusclePolicy
from rmuscle_core.processing import feature_statistics, write_processors

CAMERAS, STATE = ('top', 'wrist'), 4


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory):
    """An untrained pi0.5 with every file of a LeRobot checkpoint."""
    directory = tmp_path_factory.mktemp('checkpoint')
    torch.manual_seed(0)
    stack = {'layers': 2, 'mlp': 64, 'heads': 2, 'head_dim': 8}
    config = ModelConfig('pi05', VisionConfig(image_size=32, patch=8, width=16, layers=1, mlp=32, heads=2),
                         TransformerConfig(width=32, **stack), TransformerConfig(width=16, **stack), vocab=520,
                         cameras=CAMERAS, state_dim=STATE, action_dim=STATE, chunk_size=4, execute_steps=4, steps=5,
                         prompt_length=80)
    save_checkpoint(VLA(config), directory, {'rmuscle_tokenizer': 'byte', 'rmuscle_vision_heads': 2})
    features = {f'observation.images.{c}': {'type': 'VISUAL', 'shape': [3, 32, 32]} for c in CAMERAS}
    features['observation.state'] = {'type': 'STATE', 'shape': [STATE]}
    features['action'] = {'type': 'ACTION', 'shape': [STATE]}
    values = feature_statistics(np.random.default_rng(0).normal(size=(100, STATE)))
    write_processors(directory, 'pi05', features, {'observation.state': values, 'action': values},
                     {'VISUAL': 'IDENTITY', 'STATE': 'QUANTILES', 'ACTION': 'QUANTILES'}, 80)
    return directory


@pytest.fixture
def recording(tmp_path):
    random = np.random.default_rng(0)
    episodes = [RecordedEpisode(f'seed-{e}', e != 1, [
        Observation({c: random.integers(0, 256, (32, 32, 3), dtype=np.uint8) for c in CAMERAS},
                    random.normal(size=STATE).astype(np.float32), 'Stack it') for _ in range(3)]) for e in range(3)]
    write_recording(tmp_path / 'episodes.h5', episodes)
    return tmp_path / 'episodes.h5'


def build(checkpoint, recording, out):
    return main(['library', 'build', '--checkpoint', str(checkpoint), '--episodes', str(recording), '--out', str(out)])


def test_build_info_verify(checkpoint, recording, tmp_path, capsys):
    out = tmp_path / 'library'
    assert build(checkpoint, recording, out) == 0
    assert '3 episodes added' in capsys.readouterr().out
    assert build(checkpoint, recording, out) == 0
    assert '0 episodes added' in (again := capsys.readouterr().out) and ', 3 were there' in again
    assert main(['library', 'info', str(out), '--json']) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found['tasks'], found['references'], found['successful']) == ({'stack-it': 3}, 9, 2)
    assert found['problems'] == [] and found['bytes_per_reference'] > 0
    assert main(['library', 'info', str(out)]) == 0 and 'stack-it: 3' in capsys.readouterr().out
    assert main(['library', 'verify', str(out)]) == 0


def test_info_shows_this_library_and_full_size_only_when_asked(checkpoint, recording, tmp_path, capsys):
    out = tmp_path / 'library'
    build(checkpoint, recording, out)
    capsys.readouterr()
    assert main(['library', 'info', str(out)]) == 0 and 'pi0.5' not in capsys.readouterr().out
    assert main(['library', 'info', str(out), '--memory']) == 0
    assert 'pi0.5 at full size' in (text := capsys.readouterr().out) and 'device entry' in text and '800' in text
    assert main(['library', 'info', str(out), '--memory', '--json']) == 0
    assert [row['entries'] for row in json.loads(capsys.readouterr().out)['memory']['libraries']] == [200, 400, 800]


def refuse(*_):
    raise LibraryError('the disk is full; free some space')


@pytest.mark.parametrize(('fault', 'code'), [(refuse, 3), (KeyboardInterrupt, 130)])
def test_a_build_that_fails_at_its_first_episode_leaves_no_library(checkpoint, recording, tmp_path, monkeypatch, fault,
                                                                   code):
    out = tmp_path / 'library'
    with monkeypatch.context() as patch:
        patch.setattr(EpisodeLibrary, 'add_episode', MagicMock(side_effect=fault))
        assert build(checkpoint, recording, out) == code and not out.exists()
        (out / 'notes').mkdir(parents=True)
        (out / 'notes/mine.txt').touch()
        assert build(checkpoint, recording, out) == code
        assert sorted(path.name for path in out.rglob('*')) == ['mine.txt', 'notes']
    assert build(checkpoint, recording, out) == 0
    with monkeypatch.context() as patch:
        patch.setattr(EpisodeLibrary, 'add_episode', MagicMock(side_effect=fault))
        (out / 'stack-it/seed-2.h5').unlink()
        assert build(checkpoint, recording, out) == code  # the library was there before
    assert len(EpisodeLibrary.open(out).episodes) == 2


def test_a_build_without_a_usable_episode_makes_no_library(checkpoint, tmp_path, capsys):
    write_recording(tmp_path / 'episodes.h5', [RecordedEpisode('one', True, [])])
    out = tmp_path / 'library'
    assert build(checkpoint, tmp_path / 'episodes.h5', out) == 1 and not out.exists()
    assert 'was not made, 1 skipped:' in capsys.readouterr().out


def test_verify_names_a_damaged_episode_and_leaves_it(checkpoint, recording, tmp_path, capsys):
    out = tmp_path / 'library'
    build(checkpoint, recording, out)
    path = out / 'stack-it' / 'seed-2.h5'
    path.write_bytes(path.read_bytes()[:-100])
    assert main(['library', 'verify', str(out)]) == 1
    assert 'seed-2.h5' in capsys.readouterr().out and path.exists()


def test_a_library_of_other_weights_is_refused(checkpoint, recording, tmp_path, capsys):
    out = tmp_path / 'library'
    build(checkpoint, recording, out)
    stored = json.loads((out / 'library.json').read_text())
    stored['fingerprint']['weights'] = 'another'
    (out / 'library.json').write_text(json.dumps(stored))
    assert build(checkpoint, recording, out) == 3 and 'another weights' in capsys.readouterr().err


def test_a_recording_without_a_camera_serves_robots_without_it(checkpoint, tmp_path):
    random = np.random.default_rng(0)
    seen = [Observation({'wrist': random.integers(0, 256, (32, 32, 3), dtype=np.uint8)},
                        random.normal(size=STATE).astype(np.float32), 'Stack it') for _ in range(2)]
    write_recording(tmp_path / 'episodes.h5', [RecordedEpisode('one', True, seen)])
    assert build(checkpoint, tmp_path / 'episodes.h5', tmp_path / 'library') == 0
    policy = MusclePolicy.load(checkpoint, library=tmp_path / 'library', cameras=('wrist',), need_library=True)
    try:
        policy.warm_up('Stack it')
        assert policy.infer(seen[0]).report.path == 'library'
    finally:
        policy.close()
