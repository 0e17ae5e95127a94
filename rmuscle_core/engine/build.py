# SPDX-License-Identifier: Apache-2.0
"""Which engine serves a model."""

from __future__ import annotations

import logging

import torch

from rmuscle_core.engine.eager import EagerEngine
from rmuscle_core.engine.graphs import GraphEngine
from rmuscle_core.engine.self_check import disagreement
from rmuscle_core.model import VLA, ModelConfig
from rmuscle_core.settings import Settings

log = logging.getLogger(__name__)

GRAIN = 256  # widths that the kernels' tiles divide on every GPU


def build_engine(model: VLA, settings: Settings, views: int) -> EagerEngine | GraphEngine:
    """The graph engine for a pi0.5 on a GPU that the kernels fit and that computes right with them, else the eager."""
    if model.cos.device.type != 'cuda':
        return EagerEngine(model, settings, views)
    reason = obstacle(model.config)
    if reason:
        log.warning(f'calls run on the plain engine, several times slower than the fast one, since {reason}')
        return EagerEngine(model, settings, views)
    return checked(GraphEngine, model, settings, views)


def checked(kind: type[GraphEngine], model: VLA, settings: Settings, views: int) -> EagerEngine | GraphEngine:
    """The engine asked for if it builds, runs and agrees with the plain model; else the eager one, with a warning."""
    try:
        engine = kind(model, settings, views)
        problem = disagreement(engine, model)
    except torch.OutOfMemoryError:
        raise  # the eager engine needs as much
    except Exception as error:  # noqa: BLE001 - compilers raise what they like, and each has a slower way round it
        problem = (f'the fast engine does not run here ({type(error).__name__}: {error}); calls run on the plain '
                   'engine, slower. On Jetson Thor set TRITON_PTXAS_BLACKWELL_PATH to the ptxas of CUDA 13')
    if problem:
        log.warning(problem)
        return EagerEngine(model, settings, views)
    return engine


def obstacle(config: ModelConfig) -> str:
    """Why the kernels cannot serve this model, as the end of a sentence; empty where they can."""
    size, width = config.prefix.head_dim, config.expert.width
    if config.kind != 'pi05':
        return 'pi0 has a state token, which needs a mask that the fast kernels lack'
    if config.weight_dtype == 'fp8':
        return 'no fused kernel reads 8-bit weights yet (weight_dtype fp8 halves the memory of FFN weights only)'
    if config.compute_dtype != torch.bfloat16:
        return 'the checkpoint computes in float32; set "dtype": "bfloat16" in its config.json'
    whole = config.prefix.width % GRAIN == 0 and width % GRAIN == 0 and not width & (width - 1)
    if not whole or size < 32 or size & (size - 1):
        return f'its widths ({config.prefix.width}, {width}, head_dim {size}) do not fill the kernels\' tiles'
    return ''
