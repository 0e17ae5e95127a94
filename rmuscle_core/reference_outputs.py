# SPDX-License-Identifier: Apache-2.0
"""Outputs of a checkpoint for one batch, stage by stage, as `rmuscle verify` stores and compares them.

Each array's axes are in SHAPES. Two arrays have the same size on an axis of the same letter: C views with masked ones,
c cameras, B items, P prompt tokens, R padded prefix rows; the other letters are sizes of the model. What is before and
after the network is compared where it is there. Floats are float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from rmuscle_core import npz
from rmuscle_core.errors import CheckpointError, reason
from rmuscle_core.model import VLA, ModelConfig
from rmuscle_core.processing.recipe import Recipe

SHAPES = {'images_preprocessed': 'CB3SS', 'image_masks': 'CB', 'token_ids': 'BP', 'token_mask': 'BP', 'noise': 'BHA',
          'prefix_embs': 'BRD', 'prefix_pad': 'BR', 'prefix_k': 'LB1Rh', 'prefix_v': 'LB1Rh', 'prefix_ffn_in': 'LBRD',
          'prefix_ffn_out': 'LBRD', 'velocities': 'KBHA', 'actions_full': 'BHA'}
PREPROCESSING = {'images_u8': 'cB3yx', 'raw_state': 'Bs', 'state_normalized': 'Bs', 'actions_unnormalized': 'BHa'}
KINDS = {'token_ids': 'iu', 'image_masks': 'b', 'token_mask': 'b', 'prefix_pad': 'b', 'images_u8': 'u'}  # of dtypes
RECORD = 'make it with: rmuscle verify --checkpoint OTHER_DIR --record FILE.npz'
PICTURE = (96, 128)  # rows and columns of a drawn picture: letterboxed by every model
TOKENS = 16


def dense(x, mlp, layer: int, step: int):
    """The plain FFN."""
    return mlp(x)


def read_reference(path: str | Path) -> dict[str, np.ndarray]:
    """Read the arrays of a reference file; raises CheckpointError naming what it lacks."""
    try:
        with npz.opened(path) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except npz.FAULTS as error:
        raise CheckpointError(f'cannot read the reference {path} ({reason(error)}); {RECORD}') from error
    expected = (*SHAPES, *(PREPROCESSING if 'images_u8' in arrays else ()))
    missing = [name for name in expected if name not in arrays]
    if missing:
        raise CheckpointError(f'the reference {path} lacks {", ".join(missing)}; {RECORD}')
    return arrays


def check_fits(model: VLA, reference: Mapping[str, np.ndarray]) -> None:
    """Raise CheckpointError when the reference is that of a model of other sizes, or its arrays disagree."""
    config = model.config
    again = 'record it with the same checkpoint'
    if ('state_padded' in reference) != (config.kind == 'pi0'):
        raise CheckpointError(f'the reference has {"a" if "state_padded" in reference else "no"} state token, but the '
                              f'model is {config.kind}; {again}')
    sizes = {'1': 1, '3': 3, 'S': config.vision.image_size, 'H': config.chunk_size, 'A': config.padded_dim,
             'D': config.prefix.width, 'L': config.prefix.layers, 'h': config.prefix.head_dim, 'K': config.steps,
             's': config.state_dim, 'a': config.action_dim}
    for name, axes in {**SHAPES, **PREPROCESSING, 'state_padded': 'BA'}.items():
        if name in reference:
            shape, expected = reference[name].shape, ', '.join(str(sizes.get(axis, axis)) for axis in axes)
            fits = len(shape) == len(axes) and all(size == sizes.setdefault(axis, size) > 0
                                                   for axis, size in zip(axes, shape))
            if not fits or reference[name].dtype.kind not in KINDS.get(name, 'f'):
                raise CheckpointError(f'the reference has {name} {reference[name].dtype} {list(shape)}, this model '
                                      f'makes [{expected}]; {again}')
    if not 0 <= reference['token_ids'].min() <= reference['token_ids'].max() < config.vocab:
        raise CheckpointError(f'the reference has a token {reference["token_ids"].max()}, but this model embeds '
                              f'{config.vocab}; {again}')
    views = reference['image_masks'].sum(0)
    rows = views * config.vision.tokens + reference['token_mask'].sum(1)
    if not views.all() or (reference['prefix_pad'].sum(1) != rows).any():
        raise CheckpointError(f'the reference marks {reference["prefix_pad"].sum(1).tolist()} prefix rows as used, its '
                              f'views and tokens are {rows.tolist()}; {again}')


@torch.inference_mode()
def record(model: VLA, recipe: Recipe, seed: int = 0) -> dict[str, np.ndarray]:
    """Run one random observation, within the training range of the state, and keep what every stage makes of it."""
    config = model.config
    inputs = _draw(config, recipe, np.random.default_rng(seed))
    pictures = {name: picture[0].transpose(1, 2, 0) for name, picture in zip(config.cameras, inputs['images_u8'])}
    images, _ = recipe.views.encode(pictures)
    normalized, padded = recipe.forward(inputs['raw_state'][0])
    device = model.prefix_weight.device
    ids = torch.from_numpy(inputs['token_ids'][0]).to(device)
    prefix = torch.cat((model.embed_images(images.to(device)).flatten(0, 1), model.embed_prompt(ids)))[None]
    ffn_in = np.zeros((config.prefix.layers, *prefix.shape), np.float32)  # the last layer's stays: it is not computed
    ffn_out = ffn_in.copy()

    def ffn(x, mlp, layer: int, step: int):
        y = mlp(x)
        ffn_in[layer], ffn_out[layer] = x.float().cpu(), y.float().cpu()
        return y

    cache = model.prefill(prefix, ffn)
    noise = torch.from_numpy(inputs['noise']).to(device)
    state = torch.from_numpy(padded)[None].to(device) if config.kind == 'pi0' else None
    velocities, x = [], noise
    for step in range(config.steps):
        velocities.append(model.velocity(cache, x, step, dense, state))
        x = x - velocities[-1] / config.steps
    actions = model.denoise(cache, noise, dense, state).float().cpu().numpy()
    keys, values = (torch.stack([part[:, :, :cache.length].float() for part in side]).cpu().numpy()
                    for side in (cache.k, cache.v))
    return {**inputs, 'images_preprocessed': images.numpy()[:, None], 'image_masks': np.ones((len(images), 1), bool),
            'state_normalized': normalized[None], 'prefix_embs': prefix.float().cpu().numpy(),
            'prefix_pad': np.ones((1, prefix.shape[1]), bool), 'prefix_k': keys, 'prefix_v': values,
            'prefix_ffn_in': ffn_in, 'prefix_ffn_out': ffn_out,
            'velocities': torch.stack(velocities).float().cpu().numpy(), 'actions_full': actions,
            'actions_unnormalized': recipe.to_robot(actions[0], inputs['raw_state'][0])[None],
            **({'state_padded': padded[None]} if state is not None else {})}


def _draw(config: ModelConfig, recipe: Recipe, generator: np.random.Generator) -> dict[str, np.ndarray]:
    tokens = min(TOKENS, config.prompt_length)
    scaled = generator.uniform(-1, 1, config.state_dim).astype(np.float32)
    return {
        'images_u8': generator.integers(0, 256, (len(config.cameras), 1, 3, *PICTURE), dtype=np.uint8),
        'raw_state': recipe.normalization.states.unnormalize(scaled)[None],
        'token_ids': generator.integers(3, config.vocab, (1, tokens)), 'token_mask': np.ones((1, tokens), bool),
        'noise': generator.standard_normal((1, config.chunk_size, config.padded_dim), dtype=np.float32)}
