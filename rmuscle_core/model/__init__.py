# SPDX-License-Identifier: Apache-2.0
"""pi0 / pi0.5 in plain torch."""

from rmuscle_core.model.checkpoint import load_model, save_checkpoint
from rmuscle_core.model.checkpoint_config import load_config
from rmuscle_core.model.config import ModelConfig, TransformerConfig, VisionConfig
from rmuscle_core.model.prefix import PrefixCache
from rmuscle_core.model.vla import VLA

__all__ = ['VLA', 'ModelConfig', 'PrefixCache', 'TransformerConfig', 'VisionConfig', 'load_config', 'load_model',
           'save_checkpoint']
