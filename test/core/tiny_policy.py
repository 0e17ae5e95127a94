# SPDX-License-Identifier: Apache-2.0
"""A tiny pi0.5 checkpoint in LeRobot's layout, and calls of it."""

from __future__ import annotations

import numpy as np
import torch

from rmuscle_core.model import VLA, ModelConfig, TransformerConfig, VisionConfig, load_config, save_checkpoint
from rmuscle_core.model.checkpoint_config import config_json
from rmuscle_core.processing import write_processors
from rmuscle_core.settings import Settings

CAMERAS, JOINTS, PROMPT = ('base', 'wrist'), 5, 'lift the cube'
WAIT_S = 60.0  # an upper bound, never waited for when the code is right
OPEN = Settings().with_values(token_ratio=0.5, neuron_ratio=0.5, min_similarity=0.0, action_similarity=0.0,
                              residual='reference', step_tilt=0.0, layer_tilt=0.0)
NORMALISATION = {'VISUAL': 'IDENTITY', 'STATE': 'QUANTILES', 'ACTION': 'QUANTILES'}


def write_checkpoint(directory, seed=0):
    torch.manual_seed(seed)
    model = VLA(ModelConfig(
        kind='pi05', vision=VisionConfig(32, 8, 32, 1, 64, 2), prefix=TransformerConfig(32, 3, 64, 2, 1, 16),
        expert=TransformerConfig(32, 3, 64, 2, 1, 16), vocab=520, cameras=CAMERAS, state_dim=JOINTS, action_dim=JOINTS,
        chunk_size=8, execute_steps=4, steps=4))
    save_checkpoint(model, directory, {'rmuscle_tokenizer': 'byte'})
    write_statistics(directory)
    return directory


def write_statistics(directory, unit=1.0, centre=0.0, **options):
    """The processors of a robot whose joints all move by ``unit`` about ``centre``; options: of write_processors."""
    config = load_config(directory)
    features = config_json(config)
    low, high = centre - unit, centre + unit
    values = {'min': low, 'max': high, 'mean': centre, 'std': unit, 'q01': low, 'q99': high}
    statistics = {key: {name: np.full(JOINTS, value, np.float32) for name, value in values.items()}
                  for key in ('observation.state', 'action')}
    write_processors(directory, 'pi05', {**features['input_features'], **features['output_features']}, statistics,
                     NORMALISATION, config.prompt_length, **options)


def run(policy, observations):
    """Calls with all the time in the world between them."""
    chunks = []
    for observation in observations:
        chunks.append(policy.infer(observation))
        policy.chunk_published(float('inf'))
        assert policy.wait_ready(WAIT_S)
    return chunks
