# SPDX-License-Identifier: Apache-2.0
"""ModelConfig of a LeRobot checkpoint directory: sizes from tensor shapes, semantics from config.json."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from rmuscle_core.errors import CheckpointError
from rmuscle_core.model.config import ModelConfig, TransformerConfig, VisionConfig
from rmuscle_core.model.layout import EMBEDDING, EXPERT, LANGUAGE, LANGUAGE_HEAD, VISION, canonical

WEIGHTS = 'model.safetensors'
IMAGES = 'observation.images.'
STATE, ACTION = 'observation.state', 'action'
# Set, each of these makes a different network or different weights than the file holds.
UNSUPPORTED = ('use_visual_memory', 'use_proprioceptive_memory', 'use_peft')
VARIANTS = {'paligemma_variant': 'gemma_2b', 'action_expert_variant': 'gemma_300m'}


class Shapes(dict):
    """Canonical tensor name -> shape of a weights file; a missing name is a CheckpointError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with safe_open(path, 'pt') as weights:
                keys = weights.keys()
                super().__init__((canonical(key), tuple(weights.get_slice(key).get_shape())) for key in keys)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read the weights {path}: {error}; expected LeRobot's single-file "
                                  'checkpoint, copy the directory again') from error
        if EMBEDDING not in self and LANGUAGE_HEAD in self:
            self[EMBEDDING] = self[LANGUAGE_HEAD]

    def __missing__(self, name: str) -> tuple[int, ...]:
        raise CheckpointError(f'{self.path} has no tensor {name}, so it is no complete pi0 or pi0.5 checkpoint in '
                              'LeRobot 0.4+ layout; load and re-save it with LeRobot')

    def count(self, stack: str) -> int:
        """Layers of a stack, from the indices after ``layers.``."""
        start = stack + 'layers.'
        return 1 + max((int(name[len(start):].split('.')[0]) for name in self if name.startswith(start)), default=-1)


def load_config(directory: str | Path) -> ModelConfig:
    """Read a checkpoint's configuration; only the header of the weights file is touched.

    Raises CheckpointError naming the file and the key or tensor.
    """
    directory = Path(directory)
    path = directory / 'config.json'
    raw = read_json(path)
    shapes = Shapes(directory / WEIGHTS)
    kind = 'pi0' if 'state_proj.weight' in shapes else 'pi05'
    _refuse_unsupported(raw, kind, path)
    inputs, outputs = raw.get('input_features') or {}, raw.get('output_features') or {}
    dtype = raw.get('dtype', 'float32')
    chunk = raw.get('chunk_size', 50)
    stacks = _vision(raw, shapes, directory), _transformer(shapes, LANGUAGE), _transformer(shapes, EXPERT)
    try:
        config = ModelConfig(
            kind, *stacks, vocab=shapes[EMBEDDING][0], cameras=_cameras(inputs, path),
            state_dim=_width(inputs, STATE, path), action_dim=_width(outputs, ACTION, path),
            padded_dim=shapes['action_in_proj.weight'][1], chunk_size=chunk,
            steps=raw.get('num_inference_steps', 10),
            prompt_length=raw.get('tokenizer_max_length', 200 if kind == 'pi05' else 48), dtype=dtype,
            min_period=raw.get('min_period', 4e-3), max_period=raw.get('max_period', 4.0),
            execute_steps=raw.get('n_action_steps', chunk),
            rounded_rope=raw.get('rmuscle_rounded_rope', dtype == 'bfloat16'))
    except CheckpointError as error:
        raise CheckpointError(f'{path}: {error}') from error
    _check_sizes(raw, config, path)
    return config


def config_json(config: ModelConfig) -> dict[str, Any]:
    """The config.json content that load_config reads back as ``config``."""
    size = config.vision.image_size
    inputs = {IMAGES + name: {'type': 'VISUAL', 'shape': [3, size, size]} for name in config.cameras}
    return {
        'type': config.kind, 'input_features': {**inputs, STATE: {'type': 'STATE', 'shape': [config.state_dim]}},
        'output_features': {ACTION: {'type': 'ACTION', 'shape': [config.action_dim]}}, **VARIANTS,
        'dtype': config.dtype, 'chunk_size': config.chunk_size, 'n_action_steps': config.execute_steps,
        'max_state_dim': config.padded_dim, 'max_action_dim': config.padded_dim, 'num_inference_steps': config.steps,
        'min_period': config.min_period, 'max_period': config.max_period, 'image_resolution': [size, size],
        'empty_cameras': 0, 'tokenizer_max_length': config.prompt_length,
        'rmuscle_vision_heads': config.vision.heads, 'rmuscle_rounded_rope': config.rounded_rope,
    }


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of a checkpoint; raises CheckpointError naming the file."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f'cannot read {path} ({error}); point to a complete LeRobot checkpoint directory '
                              '(usually .../pretrained_model)') from error
    if not isinstance(content, dict):
        raise CheckpointError(f'{path} must hold a JSON object, not a {type(content).__name__}; re-export the '
                              'checkpoint')
    return content


def _refuse_unsupported(raw: Mapping[str, Any], kind: str, path: Path) -> None:
    if raw.get('type', kind) != kind:
        raise CheckpointError(f'{path} says type {raw["type"]!r} but the tensors are those of {kind}; correct "type", '
                              'or use a pi0 or pi05 checkpoint')
    for key in UNSUPPORTED:
        if raw.get(key):
            raise CheckpointError(f'{path} sets {key}, which is not supported; '
                                  + ('merge the adapter into the base model first' if key == 'use_peft'
                                     else 'use a checkpoint trained without it'))
    for key, value in VARIANTS.items():
        if raw.get(key, value) != value:
            raise CheckpointError(f'{path} sets {key} to {raw[key]!r}; only {value!r} is supported, so use a '
                                  'checkpoint of that size')


def _cameras(inputs: Mapping[str, Any], path: Path) -> tuple[str, ...]:
    """Cameras in dict order; LeRobot's padding views are always masked, so they are left out."""
    names = [key.removeprefix(IMAGES) for key, feature in inputs.items() if feature.get('type') == 'VISUAL']
    cameras = tuple(name for name in names if not name.startswith('empty_camera'))
    if not cameras:
        raise CheckpointError(f'{path} names no camera: expected VISUAL entries under "input_features"; use a '
                              'config.json written by LeRobot')
    return cameras


def _width(features: Mapping[str, Any], key: str, path: Path) -> int:
    shape = features.get(key, {}).get('shape')
    if not shape:
        raise CheckpointError(f'{path} has no shape for the feature {key!r}; use a config.json written by LeRobot')
    return shape[0]


def _vision(raw: Mapping[str, Any], shapes: Shapes, directory: Path) -> VisionConfig:
    tokens, width = shapes[VISION + 'embeddings.position_embedding.weight']
    patch = shapes[VISION + 'embeddings.patch_embedding.weight'][-1]
    return VisionConfig(image_size=math.isqrt(tokens) * patch, patch=patch, width=width,
                        layers=shapes.count(VISION + 'encoder.'),
                        mlp=shapes[VISION + 'encoder.layers.0.mlp.fc1.weight'][0],
                        heads=_vision_heads(raw, width, directory))


def _vision_heads(raw: Mapping[str, Any], width: int, directory: Path) -> int:
    """No tensor shape tells the number of vision heads; only So400m's is known."""
    if 'rmuscle_vision_heads' in raw:
        return raw['rmuscle_vision_heads']
    meta = directory / 'tiny_meta.json'  # beside the reduced checkpoints that parity with LeRobot is shown on
    if meta.is_file():
        return read_json(meta)['tiny']['vit_heads']
    if width == 1152:
        return 16
    raise CheckpointError(f'{directory / "config.json"}: the vision tower is {width} wide, and the number of its '
                          'attention heads is unknown; add the key "rmuscle_vision_heads"')


def _transformer(shapes: Shapes, stack: str) -> TransformerConfig:
    first = stack + 'layers.0.'
    query, width = shapes[first + 'self_attn.q_proj.weight']
    head_dim = shapes[first + 'self_attn.k_proj.weight'][0]
    return TransformerConfig(width, shapes.count(stack), shapes[first + 'mlp.gate_proj.weight'][0],
                             query // head_dim, 1, head_dim)


def _check_sizes(raw: Mapping[str, Any], config: ModelConfig, path: Path) -> None:
    size = config.vision.image_size
    for key, found, expected in (('image_resolution', list(raw.get('image_resolution', [size, size])), [size, size]),
                                 ('max_action_dim', raw.get('max_action_dim', config.padded_dim), config.padded_dim)):
        if found != expected:
            raise CheckpointError(f'{path} sets {key} to {found}, but the tensors are made for {expected}; the two '
                                  'files do not belong together')
    if config.action_dim > config.padded_dim or not 1 <= config.execute_steps <= config.chunk_size:
        raise CheckpointError(f'{path}: expected at most {config.padded_dim} action dimensions and n_action_steps in '
                              f'[1, {config.chunk_size}], found {config.action_dim} and {config.execute_steps}; '
                              'correct the key or export the checkpoint again')
