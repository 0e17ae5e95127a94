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
    assert len(lines) == 8
    assert all(line.startswith('ok') for line in lines[:7])


def test_fast_numerics_have_limits_of_their_own(capsys):
    name = 'tiny_pi05_bfloat16'
    assert verify(PARITY / name, reference_of(name), '--numerics', 'fast', '--json') == 0
    assert json.loads(capsys.readouterr().out)['numerics'] == 'fast'


def test_one_wrong_weight_shows_in_its_stage_and_after(tmp_path, capsys):
    checkpoint = Path(shutil.copytree(PARITY / 'tiny_pi05_float32', tmp_path / 'checkpoint'))
    tensors = load_file(checkpoint / 'model.safetensors')
    tensors['model.action_in_proj.bias'][0] += 1e-2
    save_file(tensors, checkpoint / 'model.safetensors')
    assert verify(checkpoint, reference_of('tiny_pi05_float32'), '--json') == 1
    report = json.loads(capsys.readouterr().out)
    assert not report['passed']
    assert [stage['name'] for stage in report['stages'] if not stage['passed']] == ['velocities', 'actions']


def test_unusable_references_are_refused_in_one_sentence(tmp_path, capsys):
    arrays = dict(np.load(reference_of('tiny_pi05_float32')))
    del arrays['velocities']
    np.savez(tmp_path / 'incomplete.npz', **arrays)
    (tmp_path / 'broken.npz').write_bytes(b'PK\3\4 cut')
    for reference, message in ((tmp_path / 'incomplete.npz', 'lacks velocities'),
                               (tmp_path / 'broken.npz', 'cannot read the reference'),
                               (tmp_path / 'absent.npz', 'cannot read the reference'),
                               (reference_of('tiny_pi0_float32'), 'a state token, but the model is pi05')):
        assert verify(PARITY / 'tiny_pi05_float32', reference) == 3
        error = capsys.readouterr().err
        assert message in error
        assert len(error.splitlines()) == 1
