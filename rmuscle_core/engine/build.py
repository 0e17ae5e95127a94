# SPDX-License-Identifier: Apache-2.0
"""Which engine serves a model, and with how many reference slots."""

from __future__ import annotations

import gc
import logging
from dataclasses import replace

import torch

from rmuscle_core.engine.budget import affordable_slots
from rmuscle_core.engine.eager import EagerEngine
from rmuscle_core.engine.faults import device_failed, first_line, free_device_memory, out_of_memory
from rmuscle_core.engine.graphs import GraphEngine
from rmuscle_core.engine.probe import remedy, require_torch_kernels, triton_obstacle
from rmuscle_core.engine.self_check import disagreement
from rmuscle_core.errors import SettingsError
from rmuscle_core.model import VLA, ModelConfig
from rmuscle_core.settings import Settings

log = logging.getLogger(__name__)

GRAIN = 256  # widths that the kernels' tiles divide on every GPU


def build_engine(model: VLA, settings: Settings, views: int) -> EagerEngine | GraphEngine:
    """The fastest engine that computes right here, with as many of the slots asked for as the device has memory for.

    What was asked for and could not be had is in ``problems``. Raises SettingsError when torch has no kernels for the
    GPU, or when it has no memory for dense calls.
    """
    device, problem = model.cos.device, ''
    require_torch_kernels(device)
    slots = affordable_slots(model.config, settings, views, device)
    while True:
        try:
            engine = _with_slots(model, replace(settings, slots=slots), views)
            break
        except Exception as error:
            if not out_of_memory(error):
                raise
            if not slots:
                raise SettingsError(f'{device} has no memory for a dense policy call ({first_line(error)}); free '
                                    'memory, use fewer cameras or weight_dtype fp8') from error
        slots //= 2  # the figures were wrong: other programs, fragmentation, a driver that does not tell
        free_device_memory(device)
    if slots < settings.slots:
        problem = (f'{device} has memory for {slots} of the {settings.slots} reference slots asked for; lower slots, '
                   'set sketch_width, or free memory')
        log.warning(problem)
        engine.problems.append(problem)
    return engine


def _with_slots(model: VLA, settings: Settings, views: int) -> EagerEngine | GraphEngine:
    """The graph engine for a pi0.5 on a GPU that the kernels fit and that computes right with them, else the eager."""
    device = model.cos.device
    if not accelerated(device):
        return EagerEngine(model, settings, views)
    reason = obstacle(model.config) or triton_obstacle(device)
    if reason:
        return _plain(model, settings, views,
                      f'calls run on the plain engine, several times slower than the fast one, since {reason}')
    return checked(GraphEngine, model, settings, views)


def accelerated(device: torch.device) -> bool:
    """Whether the fast engine is meant for the device."""
    return device.type == 'cuda'


def checked(kind: type[GraphEngine], model: VLA, settings: Settings, views: int) -> EagerEngine | GraphEngine:
    """The engine asked for if it builds, runs and agrees with the plain model; else the eager one, with a warning."""
    engine = None
    try:
        engine = kind(model, settings, views)
        problem = disagreement(engine, model)
    except Exception as error:
        if out_of_memory(error) or device_failed(error):
            raise  # the eager engine needs as much
        problem = (f'the fast engine does not run here ({first_line(error)}); calls run on the plain engine, slower; '
                   f'{remedy(error)}')
    if not problem:
        return engine
    del engine  # or both engines' slots would have to fit
    gc.collect()
    free_device_memory(model.cos.device)
    return _plain(model, settings, views, problem)


def _plain(model: VLA, settings: Settings, views: int, problem: str) -> EagerEngine:
    log.warning(problem)
    engine = EagerEngine(model, settings, views)
    engine.problems.append(problem)
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
