# SPDX-License-Identifier: Apache-2.0
"""A small pi0.5 with pi0.5's structure, observations for it, and references made of observations."""

from __future__ import annotations

import numpy as np
import torch

from rmuscle_core.library import Reference, ReferenceId
from rmuscle_core.model import VLA, ModelConfig, TransformerConfig, VisionConfig
from rmuscle_core.processing import ModelInputs

CAMERAS = ('left', 'right')


def small_config(kind: str = 'pi05') -> ModelConfig:
    return ModelConfig(kind, VisionConfig(16, 4, 16, 1, 16, 2), TransformerConfig(32, 3, 48, 2, 1, 16),
                       TransformerConfig(16, 3, 24, 2, 1, 16), vocab=60, cameras=CAMERAS, state_dim=3, action_dim=3,
                       chunk_size=5, steps=4, prompt_length=40)


def small_model(kind: str = 'pi05') -> VLA:
    torch.manual_seed(0)
    return VLA(small_config(kind)).eval()


def make_inputs(seed: int, length: int = 11, views: tuple[str, ...] = CAMERAS) -> ModelInputs:
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(len(views), 3, 16, 16, generator=generator) * 2 - 1
    ids = torch.randint(1, 60, (length,), generator=generator)
    return ModelInputs(images, views, ids, torch.zeros(32), np.zeros(3, np.float32))


def make_reference(model: VLA, seed: int, length: int = 9) -> Reference:
    inputs = make_inputs(seed, length)
    with torch.inference_mode():
        prefix = model.embed_images(inputs.images).flatten(0, 1).bfloat16()
    return Reference(ReferenceId('task', 'episode', seed), prefix, inputs.token_ids.numpy().astype(np.int32),
                     np.zeros((1, 3), np.float32), np.zeros((2, 4), np.float32), None, np.zeros((5, 3), np.float32),
                     CAMERAS)
