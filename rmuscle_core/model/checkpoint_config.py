# SPDX-License-Identifier: Apache-2.0
"""ModelConfig of a checkpoint directory: sizes from tensor shapes, semantics from its configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rmuscle_core.errors import CheckpointError
from rmuscle_core.model.config import ModelConfig, TransformerConfig, VisionConfig
from rmuscle_core.model.formats import open_source, require_weights
from rmuscle_core.model.layout import EMBEDDING, EXPERT, LANGUAGE, VISION
from rmuscle_core.model.options import check_types, read_json
from rmuscle_core.model.weights import Weights

IMAGES = 'observation.images.'
STATE, ACTION = 'observation.state', 'action'
# Set, each of these makes a different network or different weights than the file holds.
UNSUPPORTED = ('use_visual_memory', 'use_proprioceptive_memory', 'use_peft', 'adapt_to_pi_aloha',
               'use_delta_joint_actions_aloha')
TYPES = {'type': str, 'dtype': str, 'input_features': dict, 'output_features': dict, 'chunk_size': int,
         'n_action_steps': int, 'num_inference_steps': int, 'tokenizer_max_length': int, 'max_action_dim': int,
         'n_obs_steps': int, 'min_period': float, 'max_period': float, 'image_resolution': list,
         'use_relative_actions': bool, 'rmuscle_vision_heads': int, 'rmuscle_rounded_rope': bool,
         'rmuscle_tokenizer': str, 'rmuscle_compat': str}
OLD_LAYOUT = ('paligemma_with_expert.paligemma.language_model.', 'paligemma_with_expert.paligemma.vision_tower.',
              'normalize_inputs.')
VARIANTS = {'paligemma_variant': 'gemma_2b', 'action_expert_variant': 'gemma_300m'}


def load_config(directory: str | Path) -> ModelConfig:
    """Read a checkpoint's configuration; only the header of the weights file is touched.

    Raises CheckpointError naming the file and the key or tensor.
    """
    require_weights(Path(directory))
    source = open_source(directory)
    directory, path, raw = source.directory, source.described_by, source.raw
    _check_values(raw, path)
    weights = Weights(directory)
    kind = 'pi0' if 'state_proj.weight' in weights else 'pi05'
    _refuse_old_layout(weights)
    _refuse_unsupported(raw, kind, path)
    inputs, outputs = raw.get('input_features') or {}, raw.get('output_features') or {}
    dtype = raw.get('dtype', 'float32')
    chunk = raw.get('chunk_size', 50)
    stacks = _vision(raw, weights, directory), _transformer(weights, LANGUAGE), _transformer(weights, EXPERT)
    try:
        config = ModelConfig(
            kind, *stacks, vocab=weights.shape(EMBEDDING)[0], cameras=_cameras(inputs, path),
            state_dim=_width(inputs, STATE, path), action_dim=_width(outputs, ACTION, path),
            padded_dim=weights.shape('action_in_proj.weight')[1], chunk_size=chunk,
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


def _check_values(raw: Mapping[str, Any], path: Path) -> None:
    check_types(raw, TYPES, str(path), others=True)
    for key, value in raw.items():
        if TYPES.get(key) in (int, float) and not value > 0:
            raise CheckpointError(f'{path} sets {key} to {value!r}, expected a number above 0; correct it or export '
                                  'the checkpoint again')
    for group in ('input_features', 'output_features'):
        for key, feature in raw.get(group, {}).items():
            shape = feature.get('shape', []) if isinstance(feature, dict) else None
            if not isinstance(shape, list) or not all(type(size) is int and size > 0 for size in shape):
                raise CheckpointError(f'{path}: the feature {key!r} must have a "shape" of whole numbers above 0, not '
                                      f'{feature!r}; use a config.json written by LeRobot')


def _refuse_old_layout(weights: Weights) -> None:
    old = next((name for name in weights if name.startswith(OLD_LAYOUT)), None)
    if old:
        raise CheckpointError(f'{weights.path} names its tensors as LeRobot did before 0.4 ({old}); load and re-save '
                              'it with LeRobot 0.4 or later (its script migrate_policy_normalization.py)')


def _refuse_unsupported(raw: Mapping[str, Any], kind: str, path: Path) -> None:
    if raw.get('type', kind) != kind:
        raise CheckpointError(f'{path} says type {raw["type"]!r} but the tensors are those of {kind}; correct it '
                              '(in rmuscle.yaml it is "model"), or use a pi0 or pi05 checkpoint')
    for key in UNSUPPORTED:
        if raw.get(key):
            raise CheckpointError(f'{path} sets {key}, which is not supported; '
                                  + ('merge the adapter into the base model first' if key == 'use_peft'
                                     else 'use a checkpoint trained without it'))
    if raw.get('n_obs_steps', 1) != 1:
        raise CheckpointError(f'{path} sets n_obs_steps to {raw["n_obs_steps"]!r}; only 1 is supported, so use a '
                              'checkpoint that looks at one observation')
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


def _vision(raw: Mapping[str, Any], weights: Weights, directory: Path) -> VisionConfig:
    tokens, width = weights.shape(VISION + 'embeddings.position_embedding.weight')
    patch = weights.shape(VISION + 'embeddings.patch_embedding.weight')[-1]
    return VisionConfig(image_size=math.isqrt(tokens) * patch, patch=patch, width=width,
                        layers=weights.count(VISION + 'encoder.'),
                        mlp=weights.shape(VISION + 'encoder.layers.0.mlp.fc1.weight')[0],
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


def _transformer(weights: Weights, stack: str) -> TransformerConfig:
    first = stack + 'layers.0.'
    query, width = weights.shape(first + 'self_attn.q_proj.weight')
    head_dim = weights.shape(first + 'self_attn.k_proj.weight')[0]
    return TransformerConfig(width, weights.count(stack), weights.shape(first + 'mlp.gate_proj.weight')[0],
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
