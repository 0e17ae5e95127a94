# SPDX-License-Identifier: Apache-2.0
"""Equal to LeRobot, stage by stage, and why each exact saving is exact."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rmuscle_core.model import VLA, load_model
from rmuscle_core.reference_outputs import read_reference
from rmuscle_core.verify import compare

NAMES = ('tiny_pi05_float32', 'tiny_pi0_float32', 'tiny_pi05_bfloat16')


def reference_of(directory: Path) -> dict[str, np.ndarray]:
    return read_reference(next(directory.glob('*.npz')))


def dense(x, mlp, layer, step):
    return mlp(x)


def padded_prefix(model: VLA, reference: dict[str, np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """The two reference items as one padded batch, without the masked view."""
    present = torch.from_numpy(reference['images_preprocessed'][:2])
    visual = model.embed_images(present.transpose(0, 1).flatten(0, 1)).unflatten(0, (2, 2)).flatten(1, 2)
    prefix = torch.cat((visual, model.embed_prompt(torch.from_numpy(reference['token_ids']))), 1)
    return prefix, torch.from_numpy(reference['prefix_pad'].sum(1).astype(np.int32))


@pytest.mark.parametrize('name', NAMES)
def test_f01_f07_every_stage_equals_lerobot(parity, name):
    reference = reference_of(parity / name)
    # LeRobot ran a third, masked view before the prompt, and the prompt padded; `compare` feeds neither.
    assert reference['image_masks'].tolist() == [[True, True], [True, True], [False, False]]
    assert not reference['token_mask'].all()
    found = compare(load_model(parity / name), reference)
    assert found.passed and found.first == ''
    if 'float32' in name:
        assert max(stage.error for stage in found.stages.values()) < 2e-5


@pytest.mark.parametrize('name', NAMES[:2])
def test_padded_batch_equals_lerobot(parity, name):
    model, reference = load_model(parity / name), reference_of(parity / name)
    prefix, n_valid = padded_prefix(model, reference)
    prefix[0, n_valid[0]:] = 1e3  # padding must not be seen, whatever it holds
    state = torch.from_numpy(reference['state_padded']) if 'state_padded' in reference else None
    for grad in (False, True):  # with autograd the suffix keys are concatenated, without they are written in place
        with torch.set_grad_enabled(grad):
            cache = model.prefill(prefix, dense, n_valid)
            actions = model.denoise(cache, torch.from_numpy(reference['noise']), dense, state)
        assert np.abs(actions.detach().numpy() - reference['actions_full']).max() < 1e-4


def test_f04_bfloat16_needs_the_rounded_rotary_frequencies(parity):
    reference = reference_of(parity / 'tiny_pi05_bfloat16')
    valid = reference['prefix_pad'][1]
    theirs = torch.from_numpy(reference['prefix_k'][0, 1, 0, valid])
    differing = {}
    for rounded in (True, False):
        model = load_model(parity / 'tiny_pi05_bfloat16', rounded_rope=rounded)
        assert load_model(parity / 'tiny_pi05_bfloat16').config.rounded_rope
        with torch.inference_mode():
            prefix, n_valid = padded_prefix(model, reference)
            keys = model.prefill(prefix[1:, :n_valid[1]], dense).k[0][0, 0, :n_valid[1]].float()
        differing[rounded] = float((keys != theirs).float().mean())
    assert differing[True] < 0.01
    assert differing[False] > 0.1


def test_f06_last_prefix_ffn_cannot_reach_the_actions(parity, checkpoint):
    path = checkpoint / 'model.safetensors'
    tensors = load_file(path)
    dead = [key for key in tensors if 'language_model.layers.3.' in key and ('mlp' in key or '.o_proj' in key)]
    assert len(dead) == 4
    save_file({key: tensor * 0 + 7 if key in dead else tensor for key, tensor in tensors.items()}, path)
    assert compare(load_model(checkpoint), reference_of(parity / 'tiny_pi05_float32')).passed
    layers = []
    model = load_model(checkpoint)
    model.prefill(torch.zeros(1, 4, 80), lambda x, mlp, layer, step: layers.append(layer) or mlp(x))
    assert layers == [0, 1, 2]
