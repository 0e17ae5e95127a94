# SPDX-License-Identifier: Apache-2.0
"""Reading, refusing and writing LeRobot's layout."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rmuscle_core.errors import CheckpointError, SettingsError
from rmuscle_core.model import (
    VLA,
    ModelConfig,
    TransformerConfig,
    VisionConfig,
    load_config,
    load_model,
    save_checkpoint,
)
from rmuscle_core.model.layout import EMBEDDING, LANGUAGE_HEAD, is_dead, tensor_views


def edit_weights(checkpoint: Path, change) -> None:
    path = checkpoint / 'model.safetensors'
    save_file(change(load_file(path)), path)


def edit_config(checkpoint: Path, **values) -> None:
    path = checkpoint / 'config.json'
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def assert_same_weights(model: VLA, other: VLA) -> None:
    for (name, ours), theirs in zip(tensor_views(model).items(), tensor_views(other).values()):
        assert torch.equal(ours, theirs), name


def test_config_comes_from_shapes_and_json(parity):
    config = load_config(parity / 'tiny_pi05_bfloat16')
    assert config == ModelConfig(
        'pi05', VisionConfig(56, 14, 32, 3, 48, 2), TransformerConfig(80, 4, 96, 8, 1, 16),
        TransformerConfig(32, 4, 80, 8, 1, 16), vocab=512, cameras=('base_0_rgb', 'left_wrist_0_rgb'), state_dim=8,
        action_dim=7, chunk_size=10, steps=10, prompt_length=24, dtype='bfloat16', execute_steps=10,
        rounded_rope=True)
    assert load_config(parity / 'tiny_pi0_float32').kind == 'pi0'


@pytest.mark.parametrize('key', ['time_mlp_in.weight', 'paligemma_with_expert.gemma_expert.model.norm.dense.bias',
                                 'paligemma_with_expert.paligemma.model.language_model.layers.3.self_attn.k_proj.weight'])
def test_f03_missing_tensor_is_named(checkpoint, key):
    edit_weights(checkpoint, lambda tensors: {k: v for k, v in tensors.items() if k != f'model.{key}'})
    with pytest.raises(CheckpointError, match=re.escape(f'lacks 1 tensor: {key}')):
        load_model(checkpoint)


def test_unexpected_tensor_is_named(checkpoint):
    edit_weights(checkpoint, lambda tensors: {**tensors, 'model.proprio_history_proj.weight': torch.zeros(2)})
    with pytest.raises(CheckpointError, match=r'unexpected 1 tensor: proprio_history_proj\.weight'):
        load_model(checkpoint)


def test_misshapen_tensor_is_named(checkpoint):
    key = 'model.time_mlp_out.weight'
    edit_weights(checkpoint, lambda tensors: {**tensors, key: torch.zeros(32, 31)})
    with pytest.raises(CheckpointError, match=r'time_mlp_out\.weight \(32, 31\) instead of \(32, 32\)'):
        load_model(checkpoint)


def test_i01_tied_head_serves_as_embedding_and_separate_one_does_not(checkpoint, parity):
    head = load_file(checkpoint / 'model.safetensors')[f'model.{LANGUAGE_HEAD}']
    untied = load_model(checkpoint).prefix.embedding.weight
    assert not torch.equal(untied, head)
    edit_weights(checkpoint, lambda tensors: {k: v for k, v in tensors.items() if k != f'model.{EMBEDDING}'})
    assert torch.equal(load_model(checkpoint).prefix.embedding.weight, head)


@pytest.mark.parametrize('rename', [lambda key: key.removeprefix('model.'),
                                    lambda key: key.replace('.vision_model.', '.')])
def test_other_spellings_of_the_names_load(checkpoint, rename):
    expected = load_model(checkpoint)
    edit_weights(checkpoint, lambda tensors: {rename(key): value for key, value in tensors.items()})
    assert_same_weights(load_model(checkpoint), expected)


def test_dead_tensors_may_be_absent(checkpoint):
    expected = load_model(checkpoint)
    edit_weights(checkpoint, lambda tensors: {key: value for key, value in tensors.items()
                                              if not is_dead(key.removeprefix('model.'), 4)})
    assert len(load_file(checkpoint / 'model.safetensors')) == 149 - 9
    assert_same_weights(load_model(checkpoint), expected)


@pytest.mark.parametrize(('values', 'message'), [
    ({'type': 'pi0'}, "type 'pi0' but the tensors are those of pi05"),
    ({'use_peft': True}, 'sets use_peft'),
    ({'use_visual_memory': True}, 'sets use_visual_memory'),
    ({'paligemma_variant': 'gemma_2b_lora'}, "paligemma_variant to 'gemma_2b_lora'"),
    ({'image_resolution': [224, 224]}, 'image_resolution'),
    ({'max_action_dim': 24}, 'max_action_dim'),
    ({'dtype': 'float16'}, "dtype must be one of float32, bfloat16, not 'float16'"),
    ({'n_action_steps': 11}, r'n_action_steps in \[1, 10\]'),
    ({'input_features': {}}, 'names no camera'),
    ({'output_features': {}}, "feature 'action'"),
])
def test_config_that_does_not_fit_is_refused(checkpoint, values, message):
    edit_config(checkpoint, **values)
    with pytest.raises(CheckpointError, match=message):
        load_config(checkpoint)


def test_unknown_vision_heads_are_asked_for(checkpoint):
    content = json.loads((checkpoint / 'config.json').read_text())
    del content['rmuscle_vision_heads']
    (checkpoint / 'config.json').write_text(json.dumps(content))
    assert load_config(checkpoint).vision.heads == 2  # LeRobot's own tiny checkpoints say it in another file
    (checkpoint / 'tiny_meta.json').unlink()
    with pytest.raises(CheckpointError, match='rmuscle_vision_heads'):
        load_config(checkpoint)
    edit_config(checkpoint, rmuscle_vision_heads=4)
    assert load_config(checkpoint).vision.heads == 4


@pytest.mark.parametrize('name', ['config.json', 'model.safetensors'])
def test_unreadable_files_are_named(checkpoint, name):
    (checkpoint / name).write_bytes(b'\0' * 20)
    with pytest.raises(CheckpointError, match=re.escape(str(checkpoint / name))):
        load_model(checkpoint)
    (checkpoint / name).unlink()
    with pytest.raises(CheckpointError, match=re.escape(str(checkpoint / name))):
        load_model(checkpoint)


def test_saved_checkpoint_loads_back_equal(random_model, tmp_path):
    save_checkpoint(random_model, tmp_path, {'rmuscle_tokenizer': 'byte'})
    loaded = load_model(tmp_path)
    assert loaded.config == random_model.config
    assert_same_weights(loaded, random_model)
    assert json.loads((tmp_path / 'config.json').read_text())['rmuscle_tokenizer'] == 'byte'
    assert all(key.startswith('model.') for key in load_file(tmp_path / 'model.safetensors'))


def test_storage_dtype_halves_the_file_and_not_the_computation(random_model, tmp_path):
    save_checkpoint(random_model, tmp_path / 'full')
    save_checkpoint(random_model, tmp_path / 'half', storage=torch.bfloat16)
    sizes = [(tmp_path / name / 'model.safetensors').stat().st_size for name in ('full', 'half')]
    assert sizes[1] < 0.7 * sizes[0]
    loaded = load_model(tmp_path / 'half')
    assert loaded.prefix_weight.dtype == torch.float32
    assert torch.equal(loaded.prefix_weight, random_model.prefix_weight.to(torch.bfloat16).float())


def test_numerics_decide_what_is_kept_in_float32(parity):
    faithful = load_model(parity / 'tiny_pi05_bfloat16')
    fast = load_model(parity / 'tiny_pi05_bfloat16', numerics='fast')
    for model, vision in ((faithful, torch.float32), (fast, torch.bfloat16)):
        assert {p.dtype for p in model.vision.parameters()} == {vision}
        assert model.prefix_weight.dtype == torch.bfloat16
        assert model.prefix.norms.dtype == model.expert.action_in.weight.dtype == torch.float32
    assert load_model(parity / 'tiny_pi05_bfloat16', dtype='float32').prefix_weight.dtype == torch.float32


@pytest.mark.parametrize('kind', ['pi05', 'pi0'])
def test_names_shapes_and_dtypes_of_the_real_models(parity, kind):
    config = ModelConfig(kind, VisionConfig(), TransformerConfig(2048, 18, 16384), TransformerConfig(1024, 18, 4096),
                         vocab=257152, cameras=('a', 'b', 'c'), state_dim=32, action_dim=32)
    with torch.device('meta'):
        views = tensor_views(VLA(replace(config, dtype='bfloat16')))
    ours = {name: (tuple(view.shape), str(view.dtype)) for name, view in views.items()}
    section = (parity / 'real_keys.txt').read_text().split(f'===== {kind} ')[1].split('\n=====')[0]
    theirs = {}
    for line in section.splitlines()[1:]:
        name, count, shape, dtype = re.match(r'model\.(\S+) x(\d+) \((.*)\) (\w+)', line).groups()
        size = tuple(int(n) for n in shape.split(',') if n)
        theirs |= {name.replace('.N.', f'.{i}.'): (size, f'torch.{dtype}') for i in range(int(count))}
    assert ours == {name: value for name, value in theirs.items() if not is_dead(name, 18)}


@pytest.mark.parametrize('device', ['', 'gpu', 'meta', 'mps', 'cuda:99'])
def test_a_device_that_is_not_here_is_refused(parity, device):
    with pytest.raises(SettingsError, match='cpu'):
        load_model(parity / 'tiny_pi05_float32', device=device)
