# SPDX-License-Identifier: Apache-2.0
"""What is not a usable checkpoint is told by name, in one sentence with the next step, before any weight is read."""

from __future__ import annotations

import json
import pickle
import re

import pytest
import torch
import yaml
from parity_copies import as_openpi, copy_of, edit_json, edit_weights, sharded
from safetensors.torch import save_file

from rmuscle_core.errors import CheckpointError
from rmuscle_core.model import load_config, load_model


class Bomb:
    """Unpickling it would run code."""

    def __reduce__(self):
        return (exec, ("raise SystemExit('a pickle file was loaded')",))


def refusal(directory) -> str:
    with pytest.raises(CheckpointError) as refused:
        load_model(directory)
    assert len(str(refused.value).splitlines()) == 1
    return str(refused.value)


@pytest.mark.parametrize('name', ['pytorch_model.bin', 'model.pt', 'policy.ckpt'])
def test_pickle_files_are_never_loaded(tmp_path, name):
    (tmp_path / name).write_bytes(pickle.dumps(Bomb()))
    (tmp_path / 'config.json').write_text('{"type": "pi05"}')
    assert name in refusal(tmp_path) and 'model.safetensors' in refusal(tmp_path)


def test_pickle_files_beside_the_weights_are_left_alone(tmp_path):
    copy = as_openpi(copy_of('tiny_pi05_float32', tmp_path), 'pi05')
    for name in ('optimizer.pt', 'metadata.pt'):
        (copy / name).write_bytes(pickle.dumps(Bomb()))
    assert load_model(copy).config.kind == 'pi05'


@pytest.mark.parametrize(('made', 'said'), [
    ('checkpoints/last/pretrained_model/', 'point to .*/checkpoints/last/pretrained_model'),
    ('pretrained_model/', 'point to .*/pretrained_model'),
    ('params/', r'JAX.*convert_jax_model_to_pytorch\.py'),
    ('adapter_config.json', 'adapter.*merge'),
    ('adapter_model.safetensors', 'adapter.*merge'),
    ('readme.md', r'no .*model\.safetensors.*pretrained_model'),
])
def test_a_directory_without_weights_is_told_by_what_it_is(tmp_path, made, said):
    path = tmp_path / 'given' / made
    path.mkdir(parents=True) if made.endswith('/') else (path.parent.mkdir(), path.write_text('{}'))
    assert re.search(said, refusal(tmp_path / 'given'))


def test_a_hub_name_is_no_directory():
    assert 'hf download' in refusal('lerobot/pi05_base')


@pytest.mark.parametrize(('config', 'name'), [
    ({'type': 'smolvla'}, 'SmolVLA'), ({'type': 'groot'}, 'GR00T'), ({'type': 'pi0_fast'}, 'pi0-FAST'),
    ({'type': 'act'}, 'act'), ({'model_type': 'gr00t_n1_5'}, r'GR00T N1\.5'),
    ({'architectures': ['GR00T_N1_5']}, 'GR00T')])
def test_other_models_are_not_yet_supported_by_name(tmp_path, config, name):
    save_file({'weight': torch.zeros(1)}, tmp_path / 'model.safetensors')
    (tmp_path / 'config.json').write_text(json.dumps(config))
    assert re.search(f'{name} policy, which rMuscle does not run yet', refusal(tmp_path))


def test_layouts_before_lerobot_0_4_are_told(checkpoint):
    old = 'paligemma.language_model.model'
    edit_weights(checkpoint, lambda tensors: {key.replace('paligemma.model.language_model', old): value
                                              for key, value in tensors.items()})
    assert 'before 0.4' in refusal(checkpoint)


def test_one_tensor_under_two_names_is_ambiguous(checkpoint):
    edit_weights(checkpoint, lambda tensors: {**tensors, 'time_mlp_in.bias': torch.zeros(32)})
    assert 'time_mlp_in.bias a second time' in refusal(checkpoint)


def test_quantised_tensors_are_refused_by_name(checkpoint):
    key = 'model.time_mlp_in.weight'
    edit_weights(checkpoint, lambda tensors: {**tensors, key: tensors[key].to(torch.int8)})
    assert 'time_mlp_in.weight as I8' in refusal(checkpoint)


@pytest.mark.parametrize(('change', 'said'), [
    (lambda content: content['weight_map'].update(x='../outside.safetensors'), 'own directory'),
    (lambda content: content.update(weight_map={}), 'own directory'),
    (lambda content: content.pop('weight_map'), 'index'),
    (lambda content: content['weight_map'].update(x='absent.safetensors'), r'absent\.safetensors'),
])
def test_an_index_that_does_not_fit_is_refused(checkpoint, change, said):
    sharded(checkpoint)
    edit_json(checkpoint / 'model.safetensors.index.json', change)
    assert re.search(said, refusal(checkpoint))


def test_a_shard_that_was_cut_is_named(checkpoint):
    sharded(checkpoint)
    path = checkpoint / 'model-00002-of-00003.safetensors'
    path.write_bytes(path.read_bytes()[:-100])
    assert path.name in refusal(checkpoint)


@pytest.mark.parametrize(('key', 'value', 'said'), [
    ('n_obs_steps', 2, 'n_obs_steps'), ('adapt_to_pi_aloha', True, 'adapt_to_pi_aloha'),
    ('use_proprioceptive_memory', True, 'use_proprioceptive_memory')])
def test_keys_that_change_the_policy_are_refused_by_name(checkpoint, key, value, said):
    edit_json(checkpoint / 'config.json', lambda content: content.update({key: value}))
    assert said in refusal(checkpoint)


@pytest.mark.parametrize(('text', 'said'), [
    ('compat', 'key: value'), ('[', 'cannot read'), ('speed: 3', "unknown key 'speed'"),
    ('compat: 3', 'compat must be text'), ('rounded_rope: 1', 'true or false'), ('vision_heads: true', 'whole number')])
def test_a_wrong_options_file_is_refused(checkpoint, text, said):
    (checkpoint / 'rmuscle.yaml').write_text(text)
    assert said in refusal(checkpoint) and 'rmuscle.yaml' in refusal(checkpoint)


def test_options_act_like_config_keys(checkpoint):
    (checkpoint / 'rmuscle.yaml').write_text('rounded_rope: true\nvision_heads: 4\n')
    config = load_config(checkpoint)
    assert config.rounded_rope and config.vision.heads == 4
    (checkpoint / 'rmuscle.yaml').write_text('dtype: bfloat16\n')
    config = load_config(checkpoint)
    assert config.dtype == 'bfloat16' and not config.rounded_rope  # the weights have learnt exact frequencies


@pytest.fixture
def openpi(tmp_path):
    return as_openpi(copy_of('tiny_pi05_float32', tmp_path), 'pi05')


def profile(directory, **changes) -> None:
    content = yaml.safe_load((directory / 'rmuscle.yaml').read_text())
    content = {key: value for key, value in {**content, **changes}.items() if value is not None}
    (directory / 'rmuscle.yaml').write_text(yaml.safe_dump(content))


@pytest.mark.parametrize(('changes', 'said'), [
    ({'cameras': None}, 'lacks cameras'), ({'cameras': {'front': 'head'}}, 'base_0_rgb'),
    ({'cameras': {'a': 'base_0_rgb', 'b': 'base_0_rgb'}}, 'at most once'), ({'cameras': ['front']}, 'a mapping'),
    ({'model': 'pi06'}, 'pi05, pi0'), ({'model': 'pi0'}, "type 'pi0' but the tensors are those of pi05"),
    ({'relative': [6, -1, 6]}, 'relative'), ({'relative': ['6']}, 'relative'), ({'adapt_to_pi': True}, '14'),
    ({'action_horizon': 50}, 'action_horizon 10'), ({'action_horizon': 0}, 'action_horizon'),
    ({'execute_steps': 11}, 'n_action_steps'), ({'speed': 1}, "unknown key 'speed'"),
    ({'profile': 'humanoid'}, 'libero, droid, aloha'), ({'state_dim': '8'}, 'state_dim must be a whole number'),
    ({'state_dim': 0}, 'at least 1'), ({'dtype': 'int4'}, 'dtype')])
def test_a_wrong_profile_is_refused_by_key(openpi, changes, said):
    profile(openpi, **changes)
    assert said in refusal(openpi)


def test_an_openpi_directory_without_a_profile_says_how_to_get_one(openpi):
    (openpi / 'rmuscle.yaml').unlink()
    assert 'profile: NAME' in refusal(openpi) and 'libero' in refusal(openpi)
    (openpi / 'config.json').unlink()  # as openpi's training leaves it
    assert 'profile: NAME' in refusal(openpi)


def test_an_openpi_directory_needs_no_config_json(openpi):
    expected = load_config(openpi)
    (openpi / 'config.json').unlink()
    assert load_config(openpi) == expected


@pytest.mark.parametrize('name', ['libero', 'droid', 'aloha'])
def test_shipped_profiles_are_complete_and_can_be_changed(openpi, name):
    sizes = {'libero': (8, 7, 10), 'droid': (8, 8, 15), 'aloha': (14, 14, 50)}[name]
    edit_json(openpi / 'config.json', lambda content: content.update(action_horizon=sizes[2]))
    (openpi / 'rmuscle.yaml').write_text(f'profile: {name}\nvision_heads: 2\n')
    config = load_config(openpi)
    assert (config.state_dim, config.action_dim, config.chunk_size) == sizes
    assert config.dtype == 'bfloat16' and config.rounded_rope  # as openpi's own inference
    assert config.cameras[:2] == ('base_0_rgb', 'left_wrist_0_rgb')
    (openpi / 'rmuscle.yaml').write_text(f'profile: {name}\nvision_heads: 2\nexecute_steps: 3\ndtype: float32\n')
    changed = load_config(openpi)
    assert changed.execute_steps == 3 and not changed.rounded_rope
