# SPDX-License-Identifier: Apache-2.0
"""Outputs of a checkpoint for one batch, stage by stage, as `rmuscle verify` stores and compares them.

Arrays (C cameras, R padded prefix rows), float32 but for what is counted:

    images_preprocessed [C,B,3,S,S]   image_masks [C,B]   token_ids, token_mask [B,P]   noise [B,H,A_pad]
    prefix_embs [B,R,D]   prefix_pad [B,R]   prefix_k, prefix_v [L,B,1,R,head_dim]
    prefix_ffn_in, prefix_ffn_out [L,B,R,D]
    velocities [K,B,H,A_pad]   actions_full [B,H,A_pad]   state_padded [B,S_pad] (pi0 only)

and, to compare the preprocessing too: images_u8 [C,B,3,h,w]   raw_state, state_normalized [B,S]
actions_unnormalized [B,H,A]
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

ARRAYS = ('images_preprocessed', 'image_masks', 'token_ids', 'token_mask', 'noise', 'prefix_embs', 'prefix_pad',
          'prefix_k', 'prefix_v', 'prefix_ffn_in', 'prefix_ffn_out', 'velocities', 'actions_full')
PREPROCESSING = ('images_u8', 'raw_state', 'state_normalized', 'actions_unnormalized')
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
    expected = (*ARRAYS, *(PREPROCESSING if 'images_u8' in arrays else ()))
    missing = [name for name in expected if name not in arrays]
    if missing:
        raise CheckpointError(f'the reference {path} lacks {", ".join(missing)}; {RECORD}')
    return arrays


def check_fits(model: VLA, reference: Mapping[str, np.ndarray]) -> None:
    """Raise CheckpointError when the reference is that of a model of other sizes."""
    config = model.config
    size, sizes = config.vision.image_size, config.prefix
    for name, axes in (('images_preprocessed', (3, size, size)), ('noise', (config.chunk_size, config.padded_dim)),
                       ('prefix_ffn_in', (sizes.width,)), ('prefix_k', (sizes.head_dim,)),
                       ('raw_state', (config.state_dim,))):
        if name in reference and reference[name].shape[-len(axes):] != axes:
            raise CheckpointError(f'the reference has {name} {reference[name].shape}, but this model makes '
                                  f'[..., {", ".join(map(str, axes))}]; record it with the same checkpoint')
    layers, steps = len(reference['prefix_k']), len(reference['velocities'])
    if (layers, steps) != (sizes.layers, config.steps) or ('state_padded' in reference) != (config.kind == 'pi0'):
        token = 'a' if 'state_padded' in reference else 'no'
        raise CheckpointError(f'the reference has {layers} prefix layers, {steps} steps and {token} state token, but '
                              f'the model is {config.kind} with {sizes.layers} layers and {config.steps} steps; record '
                              'it with the same checkpoint')
    if reference['token_ids'].max() >= config.vocab:
        raise CheckpointError(f'the reference has a token {reference["token_ids"].max()}, but this model embeds '
                              f'{config.vocab}; record it with the same checkpoint')


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
