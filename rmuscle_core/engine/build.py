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
    if model.config.weight_dtype == 'fp8' and model.cos.device.type == 'cuda':
        log.warning('weight_dtype fp8 halves the memory of FFN weights and makes calls several times slower: no fused '
                    'kernel reads 8-bit weights yet, so calls run on the plain engine')
    if model.cos.device.type != 'cuda' or not packable(model.config):
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


def packable(config: ModelConfig) -> bool:
    """Whether the kernels serve this model: pi0.5 in bfloat16, whole tiles, powers of two where one is halved.

    Weights in 8 bits have no kernels.
    """
    size, width = config.prefix.head_dim, config.expert.width
    return (config.kind == 'pi05' and config.compute_dtype == torch.bfloat16 and config.weight_dtype == 'checkpoint'
            and size >= 32 and not size & (size - 1)
            and config.prefix.width % GRAIN == 0 and width % GRAIN == 0 and not width & (width - 1))
