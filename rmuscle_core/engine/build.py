# SPDX-License-Identifier: Apache-2.0
"""Which engine serves a model."""

from __future__ import annotations

import torch

from rmuscle_core.engine.eager import EagerEngine
from rmuscle_core.engine.graphs import GraphEngine
from rmuscle_core.model import VLA, ModelConfig
from rmuscle_core.settings import Settings

GRAIN = 256  # widths that the kernels' tiles divide on every GPU


def build_engine(model: VLA, settings: Settings, views: int) -> EagerEngine | GraphEngine:
    """The graph engine for a pi0.5 on a GPU that the kernels fit, else the eager one."""
    fast = model.cos.device.type == 'cuda' and packable(model.config)
    return (GraphEngine if fast else EagerEngine)(model, settings, views)


def packable(config: ModelConfig) -> bool:
    """Whether the kernels serve this model: pi0.5 in bfloat16, whole tiles, powers of two where one is halved."""
    size, width = config.prefix.head_dim, config.expert.width
    return (config.kind == 'pi05' and config.compute_dtype == torch.bfloat16 and size >= 32 and not size & (size - 1)
            and config.prefix.width % GRAIN == 0 and width % GRAIN == 0 and not width & (width - 1))
