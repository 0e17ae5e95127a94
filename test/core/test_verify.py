# SPDX-License-Identifier: Apache-2.0
"""``rmuscle verify`` on LeRobot's own outputs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from rmuscle_core.cli import main

PARITY = Path(__file__).parents[1] / 'data' / 'parity'


def reference_of(name: str) -> Path:
    return next((PARITY / name).glob('*.npz'))


def verify(checkpoint: Path, reference: Path, *options: str) -> int:
    return main(['verify', '--checkpoint', str(checkpoint), '--reference', str(reference), *options])


@pytest.mark.parametrize('name', ['tiny_pi05_float32', 'tiny_pi0_float32', 'tiny_pi05_bfloat16'])
def test_equal_checkpoints_pass(name, capsys):
    assert verify(PARITY / name, reference_of(name)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert '     rules: lerobot05' in lines
    lines = [line for line in lines if not line.startswith('     ')]
    assert len(lines) == 12
    assert all(line.startswith('ok') for line in lines[:9])
    assert len(lines[9].split(':')[1].split()) == len(lines[10].split(':')[1].split()) == 7  # action dimensions


def test_fast_numerics_have_limits_of_their_own(capsys):
    name = 'tiny_pi05_bfloat16'
    assert verify(PARITY / name, reference_of(name), '--numerics', 'fast', '--json') == 0
    assert json.loads(capsys.readouterr().out)['numerics'] == 'fast'


def test_i16_one_wrong_weight_shows_in_its_stage_and_after(tmp_path, capsys):
    checkpoint = Path(shutil.copytree(PARITY / 'tiny_pi05_float32', tmp_path / 'checkpoint'))
    tensors = load_file(checkpoint / 'model.safetensors')
    tensors['model.action_in_proj.bias'][0] += 1e-2
    save_file(tensors, checkpoint / 'model.safetensors')
    assert verify(checkpoint, reference_of('tiny_pi05_float32'), '--json') == 1
    report = json.loads(capsys.readouterr().out)
    assert not report['passed']
    assert [stage['name'] for stage in report['stages'] if not stage['passed']] == ['velocities', 'actions']
    assert report['first'] == 'velocities of step 0'


def copy_of(name: str, directory: Path) -> Path:
    return Path(shutil.copytree(PARITY / name, directory / 'copy'))


@pytest.mark.parametrize(('key', 'first'), [
    ('paligemma_with_expert.paligemma.model.language_model.layers.2.self_attn.k_proj.weight', 'prefix keys of layer 2'),
    ('paligemma_with_expert.paligemma.model.language_model.layers.1.mlp.down_proj.weight', 'FFN outputs of layer 1'),
    ('paligemma_with_expert.paligemma.model.multi_modal_projector.linear.weight', 'embeddings')])
def test_two_checkpoints_are_compared_and_the_first_difference_is_named(tmp_path, capsys, key, first):
    other = copy_of('tiny_pi05_float32', tmp_path)
    arguments = ['verify', '--checkpoint', str(PARITY / 'tiny_pi05_float32'), '--against', str(other)]
    assert main(arguments) == 0
    tensors = load_file(other / 'model.safetensors')
    tensors[f'model.{key}'][0] += 0.5
    save_file(tensors, other / 'model.safetensors')
    assert main(arguments) == 1
    assert f'the first difference is in: {first}' in capsys.readouterr().out


def test_checkpoints_of_different_models_are_refused_before_their_weights_are_read(capsys, monkeypatch):
    monkeypatch.setattr('rmuscle_core.verify.load_model', lambda *_: pytest.fail('weights were read'))
    first, second = PARITY / 'tiny_pi05_float32', PARITY / 'tiny_pi0_float32'
    assert main(['verify', '--checkpoint', str(first), '--against', str(second)]) == 3
    error = capsys.readouterr().err
    assert f'{first} and {second} hold different models' in error and 'kind (pi05 and pi0)' in error


def test_a_recorded_reference_has_the_name_that_was_asked_for(tmp_path):
    place = tmp_path / 'new' / 'outputs'
    assert main(['verify', '--checkpoint', str(PARITY / 'tiny_pi05_float32'), '--record', str(place)]) == 0
    assert verify(PARITY / 'tiny_pi05_float32', place) == 0


def test_a_difference_in_one_action_dimension_is_seen_in_that_dimension(tmp_path, capsys):
    checkpoint = copy_of('tiny_pi05_float32', tmp_path)
    tensors = load_file(checkpoint / 'model.safetensors')
    tensors['model.action_out_proj.weight'][3] *= 1.5
    save_file(tensors, checkpoint / 'model.safetensors')
    assert verify(checkpoint, reference_of('tiny_pi05_float32'), '--json') == 1
    errors = json.loads(capsys.readouterr().out)['action_dimensions']
    assert errors.index(max(errors)) == 3 and sorted(errors)[-2] < errors[3]


def test_other_preprocessing_is_a_difference_too(tmp_path, capsys):
    other = copy_of('tiny_pi05_float32', tmp_path)
    (other / 'rmuscle.yaml').write_text('compat: lerobot04')
    assert main(['verify', '--checkpoint', str(PARITY / 'tiny_pi05_float32'), '--against', str(other)]) == 1
    out = capsys.readouterr().out
    assert 'bars -1 here' in out and 'bars -3 there' in out and 'the first difference is in: images' in out


def test_recorded_outputs_are_a_reference(tmp_path, capsys):
    for name in ('tiny_pi05_float32', 'tiny_pi0_float32'):
        recorded = tmp_path / f'{name}.npz'
        assert main(['verify', '--checkpoint', str(PARITY / name), '--record', str(recorded)]) == 0
        assert verify(PARITY / name, recorded) == 0
    assert verify(PARITY / 'tiny_pi05_float32', recorded) == 3  # that of pi0
    assert 'state token' in capsys.readouterr().err


@pytest.mark.parametrize(('name', 'change', 'message'), [
    ('noise', lambda a: a[:0], 'noise float32 [0, 10, 32]'), ('token_ids', lambda a: a[:, :0], 'token_ids int64 [2, '
     '0]'),
    ('images_preprocessed', lambda a: a[:1], 'image_masks bool [3, 2]'), ('image_masks', lambda a: ~a, 'prefix rows'),
    ('prefix_embs', lambda a: a[0], 'prefix_embs float32 [72, 80]'), ('velocities', lambda a: a[1:], '[10, 2, 10, 32]'),
    ('token_ids', lambda a: a.astype(float), 'token_ids float64'), ('token_ids', lambda a: a - 9000, 'a token -'),
    ('token_mask', np.logical_not, 'prefix rows'), ('raw_state', lambda a: a[:, 1:], 'raw_state float32 [2, 7]'),
    ('prefix_ffn_out', lambda a: np.float32(3), 'prefix_ffn_out float32 []')])
def test_a_reference_whose_arrays_disagree_is_refused_by_the_first_of_them(tmp_path, capsys, name, change, message):
    arrays = dict(np.load(reference_of('tiny_pi05_float32')))
    np.savez(tmp_path / 'odd.npz', **{**arrays, name: change(arrays[name])})
    assert verify(PARITY / 'tiny_pi05_float32', tmp_path / 'odd.npz') == 3
    error = capsys.readouterr().err
    assert message in error and error.count('\n') == 1


def test_unusable_references_are_refused_in_one_sentence(tmp_path, capsys):
    arrays = dict(np.load(reference_of('tiny_pi05_float32')))
    for name in ('velocities', 'raw_state'):
        np.savez(tmp_path / f'no {name}.npz', **{key: value for key, value in arrays.items() if key != name})
    (tmp_path / 'broken.npz').write_bytes(b'PK\3\4 cut')
    for reference, message in ((tmp_path / 'no velocities.npz', 'lacks velocities'),
                               (tmp_path / 'no raw_state.npz', 'lacks raw_state'),
                               (tmp_path / 'broken.npz', 'cannot read the reference'),
                               (tmp_path / 'absent.npz', 'cannot read the reference'),
                               (reference_of('tiny_pi0_float32'), 'a state token, but the model is pi05')):
        assert verify(PARITY / 'tiny_pi05_float32', reference) == 3
        error = capsys.readouterr().err
        assert message in error
        assert len(error.splitlines()) == 1
