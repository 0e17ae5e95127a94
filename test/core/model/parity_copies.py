# SPDX-License-Identifier: Apache-2.0
"""The parity checkpoints in every spelling that training code has written, and what they do with raw observations."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import torch
import yaml
from safetensors.torch import load_file, save_file

from rmuscle_core.model import load_model
from rmuscle_core.model.layout import EMBEDDING, LANGUAGE_HEAD
from rmuscle_core.processing.processor import read_recipe
from rmuscle_core.reference_outputs import dense, read_reference

PARITY = Path(__file__).parents[2] / 'data' / 'parity'
NAMES = ('tiny_pi05_float32', 'tiny_pi0_float32', 'tiny_pi05_bfloat16')
CAMERAS = ('base_0_rgb', 'left_wrist_0_rgb')


def reference_of(name: str) -> dict[str, np.ndarray]:
    return read_reference(next((PARITY / name).glob('*.npz')))


def copy_of(name: str, directory: Path) -> Path:
    copy = Path(shutil.copytree(PARITY / name, directory / 'copy'))
    next(copy.glob('*.npz')).unlink()
    return copy


def edit_weights(directory: Path, change) -> None:
    path = directory / 'model.safetensors'
    save_file(change(load_file(path)), path)


def edit_json(path: Path, change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def bare(directory: Path) -> None:
    """As openpi writes them, and LeRobot's first pi0.5 base."""
    edit_weights(directory, lambda tensors: {key.removeprefix('model.'): value for key, value in tensors.items()})


def short(directory: Path) -> None:
    """As transformers 5.24 names the vision tower."""
    edit_weights(directory, lambda tensors: {key.replace('.vision_model.', '.'): value
                                             for key, value in tensors.items()})


def tied(directory: Path) -> None:
    """LeRobot up to 0.4.4: the head is the embedding, and only the head is in the file."""
    def change(tensors):
        tensors[f'model.{LANGUAGE_HEAD}'] = tensors.pop(f'model.{EMBEDDING}')
        return tensors
    edit_weights(directory, change)


def untied(directory: Path) -> None:
    """LeRobot from 0.5 on: both are in the file, and they need not agree."""
    edit_weights(directory, lambda tensors: {**tensors, f'model.{LANGUAGE_HEAD}': -tensors[f'model.{EMBEDDING}']})


def sharded(directory: Path) -> None:
    """Several files and an index, in no particular order."""
    path = directory / 'model.safetensors'
    tensors = load_file(path)
    path.unlink()
    places = {key: f'model-0000{i % 3 + 1}-of-00003.safetensors' for i, key in enumerate(sorted(tensors))}
    for name in set(places.values()):
        save_file({key: tensors[key] for key, place in places.items() if place == name}, directory / name)
    (directory / 'model.safetensors.index.json').write_text(json.dumps({'metadata': {}, 'weight_map': places}))


def old_processors(directory: Path) -> None:
    """LeRobot 0.4: no step for relative actions, so that the statistics have another number in their name."""
    pre = directory / 'policy_preprocessor.json'
    content = json.loads(pre.read_text())
    content['steps'] = [s for s in content['steps'] if s['registry_name'] != 'relative_actions_processor']
    for number, step in enumerate(content['steps']):
        if 'state_file' in step:
            name = f'policy_preprocessor_step_{number}_normalizer_processor.safetensors'
            (directory / step['state_file']).rename(directory / name)
            step['state_file'] = name
    pre.write_text(json.dumps(content))
    edit_json(directory / 'policy_postprocessor.json', lambda content: content.update(
        steps=[s for s in content['steps'] if s['registry_name'] != 'absolute_actions_processor']))
    (directory / 'rmuscle.yaml').write_text('compat: lerobot05\n')


def renamed_step(directory: Path) -> None:
    """LeRobot 0.5 calls relative actions delta actions."""
    path = directory / 'policy_preprocessor.json'
    path.write_text(path.read_text().replace('"relative_actions_processor"', '"delta_actions_processor"'))


def training_keys(directory: Path) -> None:
    """What training adds to config.json; nothing of it changes the policy."""
    edit_json(directory / 'config.json', lambda content: content.update(
        optimizer_lr=1.0, rtc_training_max_delay=4, a_key_of_the_future=[1, 2], gradient_checkpointing=True))


SPELLINGS = (bare, short, tied, untied, sharded, old_processors, renamed_step, training_keys)


def as_openpi(directory: Path, kind: str, **profile) -> Path:
    """Turn a LeRobot copy into what openpi's converter writes, with a profile of its sizes."""
    bare(directory)
    stats = load_file(next(directory.glob('policy_preprocessor_step_*')))
    for path in directory.glob('policy_*'):
        path.unlink()
    config = {'action_dim': 32, 'action_horizon': 10, 'paligemma_variant': 'gemma_2b',
              'action_expert_variant': 'gemma_300m', 'precision': 'float32'}
    (directory / 'config.json').write_text(json.dumps(config))
    named = {ours: {name: stats[f'{key}.{name}'].tolist() for name in ('mean', 'std', 'q01', 'q99')}
             for ours, key in (('state', 'observation.state'), ('actions', 'action'))}
    (directory / 'assets/lab/robot').mkdir(parents=True)
    (directory / 'assets/lab/robot/norm_stats.json').write_text(json.dumps({'norm_stats': named}))
    (directory / 'tiny_meta.json').unlink()
    content = {'model': kind, 'cameras': {'front': CAMERAS[0], 'wrist': CAMERAS[1]}, 'state_dim': 8, 'action_dim': 7,
               'action_horizon': 10, 'prompt_length': 24, 'dtype': 'float32', 'vision_heads': 2, **profile}
    (directory / 'rmuscle.yaml').write_text(yaml.safe_dump(content))
    return directory


@torch.inference_mode()
def act(directory: Path, reference: dict[str, np.ndarray], item: int) -> np.ndarray:
    """Raw pictures and raw state in, actions in robot units [H,A] out; token ids and noise are the reference's."""
    model = load_model(directory)
    recipe = read_recipe(directory, model.config)
    pictures = {name: reference['images_u8'][c, item].transpose(1, 2, 0) for c, name in enumerate(CAMERAS)}
    images, _ = recipe.views.encode(pictures)
    _, padded = recipe.forward(reference['raw_state'][item])
    ids = torch.from_numpy(reference['token_ids'][item][reference['token_mask'][item]])
    prefix = torch.cat((model.embed_images(images).flatten(0, 1), model.embed_prompt(ids)))
    state = torch.from_numpy(padded)[None] if model.config.kind == 'pi0' else None
    noise = torch.from_numpy(reference['noise'][item, None])
    actions = model.denoise(model.prefill(prefix[None], dense), noise, dense, state)[0]
    return recipe.to_robot(actions.numpy(), reference['raw_state'][item])
