# SPDX-License-Identifier: Apache-2.0
"""A tiny pi0.5 for seven joints and two cameras, random weights, in LeRobot's layout."""

from __future__ import annotations

import numpy as np
import torch

from rmuscle_core.model import VLA, ModelConfig, TransformerConfig, VisionConfig, save_checkpoint
from rmuscle_core.model.checkpoint_config import config_json
from rmuscle_core.model.initialise import initialise
from rmuscle_core.processing import write_processors

QUANTILES = {'VISUAL': 'IDENTITY', 'STATE': 'QUANTILES', 'ACTION': 'QUANTILES'}


def write_checkpoint(directory):
    """Write it and return the directory."""
    torch.manual_seed(0)
    model = VLA(ModelConfig(
        kind='pi05', vision=VisionConfig(32, 8, 32, 1, 64, 2), prefix=TransformerConfig(32, 2, 64, 2, 1, 16),
        expert=TransformerConfig(32, 2, 64, 2, 1, 16), vocab=520, cameras=('base', 'wrist'), state_dim=7, action_dim=7,
        chunk_size=16, execute_steps=8))
    initialise(model)
    save_checkpoint(model, directory, {'rmuscle_tokenizer': 'byte'})
    features = config_json(model.config)
    names = {'min': -1, 'max': 1, 'mean': 0, 'std': 1, 'q01': -1, 'q99': 1}
    statistics = {key: {name: np.full(7, value, np.float32) for name, value in names.items()}
                  for key in ('observation.state', 'action')}
    write_processors(directory, 'pi05', {**features['input_features'], **features['output_features']}, statistics,
                     QUANTILES, model.config.prompt_length)
    return directory
