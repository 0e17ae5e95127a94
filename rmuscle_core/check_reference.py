# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with a reference before anything is computed from it."""

from __future__ import annotations

import numpy as np
import torch

from rmuscle_core.library import Reference
from rmuscle_core.model import ModelConfig


def fault(reference: Reference, config: ModelConfig) -> str:
    """Why nothing sound can come of the reference, as the end of a sentence; empty if something can.

    Whether its indices suit the model is asked where it is read (`rmuscle_core.library.fitting`).
    """
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
