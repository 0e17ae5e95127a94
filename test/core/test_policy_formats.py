# SPDX-License-Identifier: Apache-2.0
"""One policy in the layouts of several training codes: the same actions through the whole of MusclePolicy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from tiny_policy import CAMERAS, JOINTS, PROMPT

from rmuscle_core.settings import Settings

PROFILE = f"""
model: pi05
cameras: {{base: base_0_rgb, wrist: left_wrist_0_rgb}}
state_dim: {JOINTS}
action_dim: {JOINTS}
action_horizon: 8
execute_steps: 4
steps: 4
dtype: float32
tokenizer: byte
vision_heads: 2
"""


@pytest.fixture
def copy(tiny_checkpoint, tmp_path):
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / 'copy'))


def as_openpi(directory: Path) -> Path:
    tensors = load_file(directory / 'model.safetensors')
    save_file({key.removeprefix('model.'): value for key, value in tensors.items()}, directory / 'model.safetensors')
    stats = load_file(next(directory.glob('policy_preprocessor_step_*')))
    named = {ours: {name: stats[f'{key}.{name}'].tolist() for name in ('mean', 'std', 'q01', 'q99')}
             for ours, key in (('state', 'observation.state'), ('actions', 'action'))}
    for path in (*directory.glob('policy_*'), directory / 'config.json'):
        path.unlink()
    (directory / 'assets/lab').mkdir(parents=True)
    (directory / 'assets/lab/norm_stats.json').write_text(json.dumps({'norm_stats': named}))
    (directory / 'rmuscle.yaml').write_text(PROFILE)
    return directory


def test_an_openpi_directory_acts_as_the_same_policy_from_lerobot(open_policy, look, copy):
    lerobot, openpi = open_policy(Settings()), open_policy(Settings(), checkpoint=as_openpi(copy))
    assert openpi.cameras == ('base_0_rgb', 'left_wrist_0_rgb') and lerobot.cameras == CAMERAS
    assert openpi.execute_steps == lerobot.execute_steps == 4
    # pictures of the model's own size are not resized, so what differs is the epsilon of the statistics
    ours, theirs = (policy.infer(look(place=1)).actions for policy in (openpi, lerobot))
    np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_weights_in_several_files_serve_the_library_of_the_single_one(open_policy, look, copy, tmp_path):
    single = open_policy(Settings(), library=tmp_path / 'library')
    chunk = single.infer(look(place=1))
    single.chunk_published(float('inf'))
    single.save_episode().result()
    tensors = load_file(copy / 'model.safetensors')
    (copy / 'model.safetensors').unlink()
    names = {key: f'part-{number % 2}.safetensors' for number, key in enumerate(tensors)}
    for name in set(names.values()):
        save_file({key: tensors[key] for key in names if names[key] == name}, copy / name)
    (copy / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': names}))
    spread = open_policy(Settings(), library=tmp_path / 'library', checkpoint=copy)
    assert spread.problems == []
    spread.reset_episode(PROMPT)
    assert spread.wait_ready(60)
    served = spread.infer(look(place=1))
    assert served.report.path == 'library'
    np.testing.assert_allclose(served.actions, chunk.actions, atol=0.2)
