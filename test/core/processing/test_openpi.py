# SPDX-License-Identifier: Apache-2.0
"""openpi's rules, written out by hand here as its transforms compute them."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from rmuscle_core.errors import CheckpointError, ObservationError
from rmuscle_core.observation import Observation
from rmuscle_core.processing import Processor, openpi
from rmuscle_core.processing.processor import read_recipe

RANDOM = np.random.default_rng(5)
SLOTS = ('base_0_rgb', 'left_wrist_0_rgb', 'right_wrist_0_rgb')


def config(kind='pi05', state_dim=8, action_dim=7, cameras=SLOTS[:2]):
    return SimpleNamespace(kind=kind, vision=SimpleNamespace(image_size=224), cameras=cameras, state_dim=state_dim,
                           action_dim=action_dim, padded_dim=32, prompt_length=200, vocab=520)


def statistics(dims=32):
    """As openpi computes them, over padded vectors."""
    low = RANDOM.uniform(-1, 0, dims)
    return {'mean': low.tolist(), 'std': RANDOM.uniform(0.5, 1, dims).tolist(), 'q01': low.tolist(),
            'q99': (low + RANDOM.uniform(0.5, 2, dims)).tolist()}


@pytest.fixture
def directory(tmp_path):
    def make(options: str, asset='robot', **changes):
        stats = {'state': statistics(), 'actions': statistics(), **changes}
        (tmp_path / 'assets' / asset).mkdir(parents=True, exist_ok=True)
        (tmp_path / 'assets' / asset / 'norm_stats.json').write_text(json.dumps({'norm_stats': stats}))
        (tmp_path / 'rmuscle.yaml').write_text(options + '\ntokenizer: byte\n')
        return tmp_path, stats
    return make


def looks(state, cameras=('image', 'wrist_image'), prompt=' pick_up the\ncup '):
    pictures = {name: RANDOM.integers(0, 256, (120, 160, 3), dtype=np.uint8) for name in cameras}
    return Observation(pictures, np.asarray(state, np.float32), prompt)


def normalized(state, stats):
    q01, q99 = (np.array(stats[name][:len(state)]) for name in ('q01', 'q99'))
    return (state - q01) / (q99 - q01 + 1e-6) * 2 - 1


def test_libero_does_not_show_the_state_and_its_actions_are_as_they_come(directory):
    path, stats = directory('profile: libero')
    processor = Processor.from_checkpoint(path, config())
    state = RANDOM.uniform(-1, 1, 8)
    inputs = processor.encode(looks(state))
    assert processor.tokenizer.decode(inputs.token_ids.tolist()) == 'pick up the cup\n'
    np.testing.assert_allclose(inputs.state_normalized, normalized(state, stats['state']), atol=1e-5)
    actions = RANDOM.uniform(-1, 1, (10, 32)).astype(np.float32)
    q01, q99 = (np.array(stats['actions'][name][:7]) for name in ('q01', 'q99'))
    expected = (actions[:, :7] + 1) / 2 * (q99 - q01 + 1e-6) + q01
    np.testing.assert_allclose(processor.decode(actions, looks(state)), expected, atol=1e-5)


def test_droid_shows_the_unpadded_state(directory):
    path, stats = directory('profile: droid')
    processor = Processor.from_checkpoint(path, config(action_dim=8))
    state = RANDOM.uniform(-1, 1, 8)
    inputs = processor.encode(looks(state, ('exterior_image_1_left', 'wrist_image_left')))
    bins = np.digitize(normalized(state, stats['state']), np.linspace(-1, 1, 257)[:-1]) - 1
    expected = f'Task: pick up the cup, State: {" ".join(map(str, bins))};\nAction: '
    assert processor.tokenizer.decode(inputs.token_ids.tolist()) == expected
    assert inputs.views == SLOTS[:2]
    assert processor.decode(np.zeros((15, 32), np.float32), looks(state)).shape == (15, 8)


def test_aloha_is_turned_into_the_base_models_space_and_back(directory):
    path, stats = directory('profile: aloha')
    processor = Processor.from_checkpoint(path, config(state_dim=14, action_dim=14, cameras=SLOTS))
    state = RANDOM.uniform(0.2, 0.8, 14)
    seen = looks(state, ('cam_high', 'cam_left_wrist', 'cam_right_wrist'))
    flips = np.array([1, -1, -1, 1, 1, 1, 1, 1, -1, -1, 1, 1, 1, 1])
    turned = state * flips
    metres = turned[[6, 13]] * (0.05800 - 0.01844) + 0.01844
    angle = np.arcsin(np.clip((0.022 ** 2 + metres ** 2 - 0.036 ** 2) / (2 * 0.022 * metres), -1, 1))
    turned[[6, 13]] = (angle - 0.5476) / (1.6296 - 0.5476)
    np.testing.assert_allclose(processor.encode(seen).state_normalized, normalized(turned, stats['state']), atol=2e-5)

    actions = RANDOM.uniform(-1, 1, (50, 32)).astype(np.float32)
    q01, q99 = (np.array(stats['actions'][name][:14]) for name in ('q01', 'q99'))
    expected = (actions[:, :14] + 1) / 2 * (q99 - q01 + 1e-6) + q01
    joints = np.array([True] * 6 + [False] + [True] * 6 + [False])
    expected += np.where(joints, turned, 0)
    expected = expected * flips
    expected[:, [6, 13]] = (expected[:, [6, 13]] + 0.5476 + 0.6213) / (1.4910 + 0.6213)
    decoded = processor.decode(actions, seen)
    np.testing.assert_allclose(decoded, expected, atol=2e-5)
    np.testing.assert_allclose(processor.encode_actions(decoded, seen), actions[:, :14], atol=1e-4)


def test_pi0_is_scaled_by_mean_and_deviation_with_openpis_epsilon_both_ways(directory):
    path, stats = directory('profile: droid\nmodel: pi0\naction_horizon: 10', state={**statistics(), 'std': [0.0] * 32})
    processor = Processor.from_checkpoint(path, config('pi0', action_dim=8))
    assert processor.state.mode == 'MEAN_STD'
    mean = np.array(stats['state']['mean'][:8], np.float32)
    np.testing.assert_allclose(processor.state.normalize(mean + np.float32(1e-6)), 1, rtol=0.2)
    np.testing.assert_allclose(processor.state.unnormalize(np.full(8, 1e6)), mean + 1, rtol=1e-4)


def test_pictures_are_resized_as_pillow_does_it(directory):
    image = pytest.importorskip('PIL.Image')
    path, _ = directory('profile: libero')
    seen = looks(np.zeros(8))
    ours = Processor.from_checkpoint(path, config()).encode(seen).images[0].numpy()
    theirs = np.zeros((224, 224, 3), np.uint8)
    picture = image.fromarray(seen.images['image'])
    theirs[28:196] = np.asarray(picture.resize((224, 168), image.Resampling.BILINEAR))
    np.testing.assert_array_equal(ours, (theirs.astype(np.float32) / 255 * 2 - 1).transpose(2, 0, 1))


def test_robots_camera_names_and_slots_are_both_understood_but_not_at_once(directory):
    path, _ = directory('profile: libero')
    processor = Processor.from_checkpoint(path, config())
    for names in (('image', 'wrist_image'), SLOTS[:2], ('image', 'left_wrist_0_rgb')):
        assert processor.encode(looks(np.zeros(8), names)).views == SLOTS[:2]
    with pytest.raises(ObservationError, match='base_0_rgb'):
        processor.encode(looks(np.zeros(8), ('image', 'base_0_rgb')))


def test_the_report_tells_openpis_choices(directory):
    path, _ = directory('profile: aloha')
    report = read_recipe(path, config(state_dim=14, action_dim=14, cameras=SLOTS)).report()
    assert report['rules'] == 'openpi' and 'antialiasing' in report['images'] and 'adapt_to_pi' in report['joint space']
    assert report['relative actions'] == '0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12'
    assert report['cameras renamed'].startswith('cam_high as base_0_rgb')


@pytest.mark.parametrize(('changes', 'said'), [
    ({'state': None}, "no statistics of 'state'"), ({'actions': {'mean': [0.0] * 7}}, r'actions\.q01'),
    ({'state': {**statistics(), 'q99': statistics()['q99'][:6]}}, r'state\.q99'),
    ({'state': {**statistics(), 'q99': [-9.0] * 32}}, 'which no data can have'),
    ({'actions': {**statistics(), 'q01': 'all'}}, 'lists of numbers')])
def test_unusable_statistics_are_refused(directory, changes, said):
    path, _ = directory('profile: libero', **changes)
    with pytest.raises(CheckpointError, match=said):
        read_recipe(path, config())


def test_statistics_of_several_robots_need_a_choice(directory):
    directory('profile: libero', asset='lab/one')
    path, _ = directory('profile: libero', asset='lab/two')
    with pytest.raises(CheckpointError, match=r'lab/one, lab/two.*asset_id'):
        read_recipe(path, config())
    (path / 'rmuscle.yaml').write_text('profile: libero\nasset_id: lab/two\n')
    assert read_recipe(path, config()).origin == 'openpi'


def test_a_missing_pillow_is_told_at_loading(directory, monkeypatch):
    path, _ = directory('profile: libero')
    monkeypatch.setattr(openpi, 'find_spec', lambda name: None)
    with pytest.raises(CheckpointError, match='pip install Pillow'):
        read_recipe(path, config())


def test_no_statistics_at_all_are_refused(directory):
    path, _ = directory('profile: libero')
    (path / 'assets/robot/norm_stats.json').unlink()
    with pytest.raises(CheckpointError, match=r'norm_stats\.json.*scale'):
        read_recipe(path, config())
