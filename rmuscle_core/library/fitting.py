# SPDX-License-Identifier: Apache-2.0
"""Whether a reference is sound and fits a model: a checksum vouches for bytes, not for what a GPU follows blindly."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from rmuscle_core.errors import EpisodeError
from rmuscle_core.library.reference import Reference

if TYPE_CHECKING:
    from rmuscle_core.arena import ArenaShape
    from rmuscle_core.model import ModelConfig

KEY_WIDTH = 256  # numbers of a retrieval key, fewer when the prefix is narrower


def library_widths(config: ModelConfig) -> tuple[int, int]:
    """(C, S): numbers of a key and of a state in this model's references."""
    return min(config.prefix.width, KEY_WIDTH), config.state_dim


def check_fits(reference: Reference, config: ModelConfig, shape: ArenaShape) -> None:
    """Raise EpisodeError naming what this model cannot take; asked where a reference is read.

    References of fewer cameras may have fewer tokens.
    """
    ids, neurons = reference.token_ids, reference.neurons
    width, views = reference.prefix.shape[1], set(reference.views)
    ranking = (shape.groups, shape.action_layers, shape.masked)
    problem = ''
    if not views <= set(config.cameras):
        problem = f'views are {", ".join(reference.views)}, the checkpoint knows {", ".join(config.cameras)}'
    elif width != config.prefix.width:
        problem = f'prefix is {width} wide, expected {config.prefix.width}'
    elif ids.min() < 0 or ids.max() >= config.vocab:
        problem = f'token_ids reach from {ids.min()} to {ids.max()}, expected 0 to {config.vocab - 1}'
    elif neurons is not None and neurons.shape != ranking:
        problem = f'neurons have the shape {neurons.shape}, expected {ranking}'
    elif neurons is not None and neurons.max() >= config.expert.mlp:
        problem = f'neurons reach to {neurons.max()}, expected at most {config.expert.mlp - 1}'
    if problem:
        raise EpisodeError(f'{reference.id} does not fit this checkpoint: {problem}; record the episode again')


def fault(reference: Reference, config: ModelConfig) -> str:
    """Why nothing sound can come of a reference, read or just made, as the end of a sentence; empty if it can."""
    ids, neurons, tokens = reference.token_ids, reference.neurons, len(reference.views) * config.vision.tokens
    if reference.prefix.shape[0] != tokens:
        return f'it has {reference.prefix.shape[0]} visual tokens, expected {tokens}'
    if not torch.isfinite(reference.prefix).all():
        return 'its embeddings are not all finite'
    if not 0 < len(ids) <= config.prompt_length:
        return f'its prompt has {len(ids)} tokens, expected 1 to {config.prompt_length}'
    if not np.isfinite(reference.states).all():
        return 'its states are not all finite'
    if neurons is not None and (np.diff(np.sort(neurons, axis=-1).astype(np.int64), axis=-1) == 0).any():
        return 'it ranks a neuron twice'
    return ''
