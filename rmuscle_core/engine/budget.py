# SPDX-License-Identifier: Apache-2.0
"""What an engine will allocate on its device, item by item, before anything is allocated."""

from __future__ import annotations

from dataclasses import replace

import torch

from rmuscle_core.engine.plan import arena_shape
from rmuscle_core.errors import SettingsError
from rmuscle_core.memory_free import available_bytes
from rmuscle_core.model import VLA, ModelConfig
from rmuscle_core.settings import Settings

MARGIN = 0.05  # of the total, for libraries' workspaces and fragmentation


def memory_budget(config: ModelConfig, settings: Settings, views: int) -> dict[str, int]:
    """Bytes by item, 'total' among them; weights are exact, activations the largest that live at once.

    8-bit FFN weights are made from whole ones, so loading them takes what the model takes without.
    """
    element = torch.finfo(config.compute_dtype).bits // 8
    with torch.device('meta'):
        model = VLA(config)
    parameters = [p.numel() * p.element_size() for p in model.parameters()]
    tokens = views * config.vision.tokens
    rows, lanes, suffix = tokens + config.prompt_length, 2, config.suffix_rows
    slot = arena_shape(settings, config, tokens).bytes_per_slot(element)
    prefix, vision = config.prefix, config.vision
    cache = 2 * prefix.layers * (rows + suffix) * prefix.head_dim * element
    activations = rows * (3 * prefix.mlp + 6 * prefix.width) * element
    items = {'weights': sum(parameters),
             'modulations': 4 * config.steps * _modulation_numbers(config),
             **{f'references: {part}': settings.slots * size for part, size in slot.items()},
             'keys and values': lanes * cache,
             'activations': lanes * activations + tokens * (vision.mlp + 8 * vision.width) * 4}
    if config.weight_dtype == 'fp8':
        items['widened weights'] = lanes * prefix.width * prefix.mlp * element
    items['margin'] = int(MARGIN * sum(items.values()))
    return {**items, 'total': sum(items.values())}


def _modulation_numbers(config: ModelConfig) -> int:
    """Per denoise step: scale, shift and gate of each expert norm, and the shifts after the products they precede."""
    expert = config.expert
    products = (expert.heads + 2) * expert.head_dim + 2 * expert.mlp
    return (2 * expert.layers + 1) * 3 * expert.width + expert.layers * products


def require_memory(budget: dict[str, int], slots: int, device: torch.device) -> None:
    """Raise SettingsError, with what to lower, when the budget exceeds what the device has free."""
    free = available_bytes(device)
    if budget['total'] > free:
        references = sum(size for item, size in budget.items() if item.startswith('references'))
        raise SettingsError(f'the model and {slots} reference slots need {budget["total"] / 1e9:.2f} GB, {device} has '
                            f'{free / 1e9:.2f} GB free; lower slots ({references / slots / 1e6:.0f} MB each), or '
                            'set sketch_width or residual = none')


def affordable_slots(config: ModelConfig, settings: Settings, views: int, device: torch.device) -> int:
    """How many of the slots asked for fit beside a model whose weights are loaded already; 0: calls can only run dense.

    Raises SettingsError when not even dense calls fit.
    """
    free = available_bytes(device)
    bare = memory_budget(config, replace(settings, slots=0), views)
    each = memory_budget(config, replace(settings, slots=1), views)['total'] - bare['total']
    needed = bare['total'] - bare['weights']
    if needed > free:
        raise SettingsError(f'a dense policy call needs {needed / 1e9:.2f} GB beside the weights, {device} has '
                            f'{free / 1e9:.2f} GB free; free memory, use fewer cameras or weight_dtype fp8')
    return min(settings.slots, int((free - needed) // each))
