# SPDX-License-Identifier: Apache-2.0
"""The processor reproduces LeRobot's own tensors and refuses what does not fit by name."""

import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rmuscle_core.errors import CheckpointError, ObservationError
from rmuscle_core.observation import Observation
from rmuscle_core.processing import Processor, feature_statistics, state_bins, write_processors

PARITY = Path(__file__).parents[2] / 'data' / 'parity'
CAMERAS = ('base_0_rgb', 'left_wrist_0_rgb')


def config(kind='pi05', **changes):
    sizes = {'kind': kind, 'vision': SimpleNamespace(image_size=56), 'cameras': CAMERAS, 'state_dim': 8,
             'action_dim': 7, 'padded_dim': 32, 'prompt_length': 120, 'vocab': 520}
    return SimpleNamespace(**{**sizes, **changes})


def byte_checkpoint(directory, **changes):
    path = directory / 'config.json'
    path.write_text(json.dumps({**json.loads(path.read_text()), 'rmuscle_tokenizer': 'byte', **changes}))
    return directory


@pytest.fixture(params=['pi05_float32', 'pi0_float32', 'pi05_bfloat16'])
def parity(request, tmp_path):
    """A tiny checkpoint of LeRobot with a byte tokenizer, and LeRobot's outputs for two observations."""
    source = PARITY / f'tiny_{request.param}'
    directory = byte_checkpoint(Path(shutil.copytree(source, tmp_path / 'checkpoint')))
    edit(directory, 'policy_preprocessor.json',  # bytes are more tokens than the checkpoint's 24
         lambda steps: next(s['config'] for s in steps if 'max_length' in s['config']).update(max_length=120))
    kind = request.param.split('_')[0]
    return Processor.from_checkpoint(directory, config(kind)), np.load(source / f'reference_{request.param}.npz')


def observation(data, i, **changes):
    pictures = {name: data['images_u8'][c, i].transpose(1, 2, 0) for c, name in enumerate(CAMERAS)}
    return Observation(**{'images': pictures, 'state': data['raw_state'][i], 'prompt': 'stack', **changes})


@pytest.mark.parametrize('i', [0, 1])
def test_equals_lerobot(parity, i):
    processor, data = parity
    inputs = processor.encode(observation(data, i))
    assert inputs.views == CAMERAS
    np.testing.assert_allclose(inputs.images, data['images_preprocessed'][:2, i], atol=1e-6)
    np.testing.assert_allclose(inputs.state_normalized, data['state_normalized'][i], atol=1e-6)
    if 'state_bins' in data:
        assert np.array_equal(state_bins(inputs.state_normalized), data['state_bins'][i])
    if 'state_padded' in data:
        np.testing.assert_allclose(inputs.state, data['state_padded'][i], atol=1e-6)
    decoded = processor.decode(data['actions_full'][i], observation(data, i))
    assert decoded.dtype == np.float32
    np.testing.assert_allclose(decoded, data['actions_unnormalized'][i], atol=1e-5)


def test_writer_reproduces_lerobots_files(parity, tmp_path):
    processor, _ = parity
    kind = processor.config.kind
    original = PARITY / f'tiny_{kind}_float32'
    steps = json.loads((original / 'policy_preprocessor.json').read_text())['steps']
    settings = next(s['config'] for s in steps if s['registry_name'] == 'normalizer_processor')
    stats = {key: {'q01': values, 'q99': values + 1, 'mean': values, 'std': values + 1}
             for key, values in (('observation.state', np.zeros(8)), ('action', np.zeros(7)))}
    write_processors(tmp_path, kind, settings['features'], stats, settings['norm_map'], 24, None)
    for name in ('policy_preprocessor.json', 'policy_postprocessor.json'):
        expected = json.loads((original / name).read_text())
        for step in expected['steps']:  # LeRobot leaves its default here, which matters only when enabled
            if step['registry_name'] == 'relative_actions_processor':
                step['config']['exclude_joints'] = []
        assert json.loads((tmp_path / name).read_text()) == expected


@pytest.fixture
def written(tmp_path):
    """A checkpoint's processor files written by `write_processors`: pi0.5, relative actions but for the gripper."""
    values = np.random.default_rng(1).normal(size=(200, 8)).astype(np.float32)
    features = {'observation.images.base_0_rgb': {'type': 'VISUAL', 'shape': [3, 56, 56]},
                'observation.state': {'type': 'STATE', 'shape': [8]}, 'action': {'type': 'ACTION', 'shape': [7]}}
    stats = {'observation.state': feature_statistics(values), 'action': feature_statistics(values[:, :7])}
    modes = {'VISUAL': 'IDENTITY', 'STATE': 'QUANTILES', 'ACTION': 'QUANTILES'}
    write_processors(tmp_path, 'pi05', features, stats, modes, 120, relative_exclude=['gripper'],
                     action_names=[f'j{i}' for i in range(6)] + ['left_Gripper'])
    (tmp_path / 'config.json').write_text('{"rmuscle_tokenizer": "byte"}')
    return tmp_path


def looks(state=None, **changes):
    state = np.zeros(8, np.float32) if state is None else state
    pictures = {'base_0_rgb': np.zeros((48, 64, 3), np.uint8)}
    return Observation(**{'images': pictures, 'state': state, 'prompt': 'stack', **changes})


def test_v16_i09_relative_actions_are_anchored_on_the_observed_state(written):
    processor = Processor.from_checkpoint(written, config())
    still, moved = (processor.decode(np.zeros((3, 32)), looks(np.full(8, s, np.float32))) for s in (0.0, 0.2))
    np.testing.assert_allclose(moved - still, np.tile([0.2] * 6 + [0.0], (3, 1)), atol=1e-6)


def test_an_absent_camera_is_left_out(written):
    inputs = Processor.from_checkpoint(written, config()).encode(looks())
    assert inputs.views == ('base_0_rgb',) and inputs.images.shape == (1, 3, 56, 56)


def test_f09_views_come_in_checkpoint_order(written):
    dark, light = (np.full((56, 56, 3), v, np.uint8) for v in (0, 255))
    inputs = Processor.from_checkpoint(written, config()).encode(
        looks(images={'left_wrist_0_rgb': light, 'base_0_rgb': dark}))
    assert inputs.views == CAMERAS and [float(i.mean()) for i in inputs.images] == [-1.0, 1.0]


@pytest.mark.parametrize('changes, named', [
    ({'images': {'front': np.zeros((4, 4, 3), np.uint8)}}, 'front'),
    ({'images': {}}, 'base_0_rgb'),
    ({'images': {'base_0_rgb': np.zeros((4, 4), np.uint8)}}, 'base_0_rgb'),
    ({'state': np.zeros(7, np.float32)}, '8'),
    ({'state': np.array([0, 0, np.nan, 0, 0, 0, 0, 0], np.float32)}, 'dimension 2'),
    ({'state': np.array([0, 0, 0, np.inf, 0, 0, 0, 0], np.float32)}, 'dimension 3'),
    ({'state': np.full(8, 1e300)}, 'dimension 0'),
    ({'state': np.full(8, 3e38, np.float32)}, 'dimension 0'),  # finite, but not once it is normalised
    ({'state': ['a'] * 8}, '8 numbers'),
    ({'state': [10 ** 400] * 8}, '8 numbers'),
    ({'images': None}, 'NoneType'),
    ({'images': {'base_0_rgb': None}}, 'base_0_rgb'),
    ({'images': {'base_0_rgb': [[0, 0, 0]]}}, 'list'),
    ({'prompt': None}, 'NoneType'),
])
def test_an_observation_that_does_not_fit_is_refused_by_name(written, changes, named):
    processor = Processor.from_checkpoint(written, config())
    with pytest.raises(ObservationError, match=named):
        processor.encode(looks(**changes))


def test_v22_a_cut_prompt_is_warned_about_once(written, caplog):
    processor = Processor.from_checkpoint(written, config())
    with caplog.at_level(logging.WARNING, 'rmuscle'):
        for _ in range(3):
            assert processor.encode(looks(prompt='a' * 5000)).token_ids.shape == (120,)
    assert len(caplog.records) == 1 and '120' in caplog.text


def test_f05_i02_old_checkpoints_pad_the_state_in_the_prompt_and_have_darker_bars(written):
    new, old = (Processor.from_checkpoint(byte_checkpoint(written, rmuscle_compat=c), config())
                for c in ('lerobot05', 'lerobot04'))
    assert old.encode(looks()).images.min() == -3 and new.encode(looks()).images.min() == -1
    assert len(old.encode(looks()).token_ids) == len(new.encode(looks()).token_ids) + 24
    assert new.report() != old.report()


def test_doubts_name_a_state_in_other_units(written):
    processor = Processor.from_checkpoint(written, config())
    assert processor.doubts(processor.neutral_state()) == {}
    degrees = processor.neutral_state() + np.array([0, 57, 0, 0, 0, 0, 0, 0], np.float32)
    (doubt,) = processor.doubts(degrees).values()
    assert 'dimension 1' in doubt and 'radians' in doubt


def edit(directory, name, change):
    path = directory / name
    content = json.loads(path.read_text())
    change(content['steps'])
    path.write_text(json.dumps(content))


@pytest.mark.parametrize('name, change, named', [
    ('policy_preprocessor.json', lambda s: s[3].update(state_file='absent.safetensors'), 'absent.safetensors'),
    ('policy_preprocessor.json', lambda s: s.pop(3), 'normalizer_processor'),
    ('policy_preprocessor.json', lambda s: s[0].update(registry_name='blur'), 'blur'),
    ('policy_preprocessor.json', lambda s: s[4]['config'].update(include_state_in_prompt=False), 'state out'),
    ('policy_preprocessor.json', lambda s: s[4].update(registry_name='pi0_new_line_processor'), 'pi0_new_line'),
    ('policy_preprocessor.json', lambda s: s.append(3), 'policy_preprocessor.json'),
    ('policy_postprocessor.json', lambda s: s[1]['config'].update(enabled=False), 'absolute_actions_processor'),
    ('config.json', None, 'config.json'),
])
def test_unusable_processor_files_are_refused_by_name(written, name, change, named):
    edit(written, name, change) if change else (written / name).write_text('[')
    with pytest.raises(CheckpointError, match=named):
        Processor.from_checkpoint(written, config())


def test_a_tokenizer_larger_than_the_embedding_is_refused(written):
    with pytest.raises(CheckpointError, match='512'):
        Processor.from_checkpoint(written, config(vocab=512))
