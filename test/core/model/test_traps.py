# SPDX-License-Identifier: Apache-2.0
"""Known ways in which a pi0 checkpoint runs and is wrong, by their numbers in docs/checkpoints.md: the network's."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from parity_copies import PARITY, act, copy_of, edit_json, edit_weights, reference_of

from rmuscle_core.errors import CheckpointError
from rmuscle_core.model import VLA, load_config, load_model
from rmuscle_core.model.checkpoint import _read_weights
from rmuscle_core.model.layout import tensor_views
from rmuscle_core.model.weights import Weights


def test_f01_f02_i03_i04_the_model_path_imports_no_transformers():
    code = ('import sys, json; from rmuscle_core.model import load_model; import rmuscle_core.processing.processor;'
            f'load_model({str(PARITY / "tiny_pi05_float32")!r});'
            'print(json.dumps([n for n in ("transformers", "tokenizers", "sentencepiece") if n in sys.modules]))')
    found = subprocess.run([sys.executable, '-c', code], check=True, stdout=subprocess.PIPE, text=True).stdout
    assert json.loads(found) == []


@pytest.mark.parametrize('name', ['tiny_pi05_float32', 'tiny_pi0_float32'])
def test_f02_f03_no_tensor_that_is_used_may_be_missing(name):
    model = load_model(PARITY / name)
    names = list(tensor_views(model))
    assert len(names) > 100
    for key in names:
        weights = Weights(PARITY / name)
        del weights[key]
        with pytest.raises(CheckpointError, match='lacks 1 tensor'):
            _read_weights(weights, model)


def test_f04_the_rotary_rounding_can_be_chosen(tmp_path):
    copy = copy_of('tiny_pi05_bfloat16', tmp_path)
    assert load_config(copy).rounded_rope
    (copy / 'rmuscle.yaml').write_text('rounded_rope: false')
    assert not load_config(copy).rounded_rope


def test_f09_the_order_of_cameras_is_that_of_config_json_and_matters(tmp_path):
    reference, copy = reference_of('tiny_pi05_float32'), copy_of('tiny_pi05_float32', tmp_path)

    def reverse(content):
        content['input_features'] = dict(reversed(content['input_features'].items()))
    edit_json(copy / 'config.json', reverse)
    assert load_config(copy).cameras == ('left_wrist_0_rgb', 'base_0_rgb')  # and no padding view
    there, here = act(PARITY / 'tiny_pi05_float32', reference, 0), act(copy, reference, 0)
    assert np.abs(there - here).max() > 1e-3


@pytest.mark.parametrize('name', ['tiny_pi05_float32', 'tiny_pi0_float32'])
def test_i05_the_kind_is_told_by_tensors_not_by_names(name, tmp_path):
    folder = tmp_path / ('pi0_libero' if 'pi05' in name else 'pi05_libero')
    folder.mkdir()
    copy = copy_of(name, folder)
    edit_json(copy / 'config.json', lambda content: content.pop('type'))
    assert load_config(copy).kind == name.split('_')[1]
    (copy / 'rmuscle.yaml').write_text('dtype: bfloat16')
    assert load_config(copy).dtype == 'bfloat16'


def test_i14_weights_come_in_the_asked_dtype_whatever_is_stored(tmp_path):
    copy = copy_of('tiny_pi05_float32', tmp_path)
    expected = load_model(copy, dtype='bfloat16')
    edit_weights(copy, lambda tensors: {key: value.to(torch.float64) for key, value in tensors.items()})
    stored_wide = load_model(copy, dtype='bfloat16')
    assert stored_wide.prefix_weight.dtype == torch.bfloat16
    for ours, theirs in zip(stored_wide.parameters(), expected.parameters()):
        assert torch.equal(ours, theirs)


def test_i15_views_go_through_the_vision_tower_together(random_model: VLA):
    calls = []
    random_model.vision.register_forward_hook(lambda module, inputs, output: calls.append(len(output)))
    random_model.embed_images(torch.zeros(3, 3, 28, 28))
    assert calls == [3]
