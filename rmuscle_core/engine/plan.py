# SPDX-License-Identifier: Apache-2.0
"""From ratios to the static sizes of one policy call."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

from rmuscle_core.arena import ArenaShape
from rmuscle_core.engine.spread import TILE, Counts, neuron_count, spread
from rmuscle_core.errors import ObservationError
from rmuscle_core.model import ModelConfig
from rmuscle_core.settings import Settings

BUCKETS = (16, 32, 48, 64, 96, 128, 200)  # prompt rows; a captured graph takes prompts padded to the next


@dataclass(frozen=True)
class CallPlan:
    """tokens: visual tokens recomputed per layer, None for a dense prefill; neurons likewise, [mask
    group][expert layer].

    residual: as in the settings; 'none' when no neurons are dropped.
    """

    tokens: int | None = None
    neurons: Counts | None = None
    residual: str = 'none'

    @property
    def dense(self) -> bool:
        return self.tokens is None and self.neurons is None

    @property
    def stored_residual(self) -> bool:
        """Whether the reference has to hold what its own dropped neurons contributed."""
        return self.residual != 'none'

    def mean_neurons(self, total: int, steps: int, group_size: int) -> int:
        """Neurons evaluated per layer and step, averaged over the steps of a call."""
        if self.neurons is None:
            return total
        dense = 1 if self.residual == 'anchored' else 0  # steps of each group
        evaluated = sum(dense * total + (size - dense) * sum(counts) / len(counts)
                        for size, counts in zip(group_steps(steps, group_size), self.neurons))
        return round(evaluated / steps)


def bucket_of(length: int, prompt_length: int) -> int:
    """Rows a prompt of this many tokens is padded to.

    Raises ObservationError for a prompt longer than the checkpoint takes.
    """
    if length > prompt_length:
        raise ObservationError(f'the prompt has {length} tokens, this checkpoint takes {prompt_length}; shorten the '
                               'instruction')
    sizes = [size for size in BUCKETS if size < prompt_length] + [prompt_length]
    return sizes[bisect_left(sizes, length)]


def token_count(ratio: float, tokens: int, text: int = 0) -> int:
    """ceil(ratio * tokens), raised so that it fills whole tiles together with the text rows when tiles matter."""
    count = min(math.ceil(ratio * tokens), tokens)
    if tokens >= 4 * TILE and 0 < count < tokens:
        count = min(math.ceil((count + text) / TILE) * TILE - text, tokens)
    return count


def group_steps(steps: int, group_size: int) -> tuple[int, ...]:
    """How many denoise steps each mask group has."""
    return tuple(min(group_size, steps - first) for first in range(0, steps, group_size))


def plan_call(settings: Settings, config: ModelConfig, tokens: int, text: int) -> CallPlan:
    """What the settings ask of one call with T visual and P text rows, padded to a bucket or not, given a reference."""
    text, total = bucket_of(text, config.prompt_length), config.expert.mlp
    context, action = settings.mode in ('context', 'full'), settings.mode in ('action', 'full')
    neurons = spread(settings.neuron_ratio, total, settings.mask_ratio, group_steps(config.steps, settings.group_size),
                     config.expert.layers, settings.step_tilt, settings.layer_tilt)
    some_dropped = any(count < total for counts in neurons for count in counts)
    return CallPlan(tokens=token_count(settings.token_ratio, tokens, text) if context else None,
                    neurons=neurons if action else None,
                    residual=settings.residual if action and some_dropped else 'none')


def arena_shape(settings: Settings, config: ModelConfig, tokens: int) -> ArenaShape:
    """Sizes of one expanded reference for T visual tokens."""
    return ArenaShape(layers=config.prefix.layers - 1, tokens=tokens, width=config.prefix.width,
                      compare_width=settings.sketch_width or config.prefix.width, steps=config.steps,
                      groups=len(group_steps(config.steps, settings.group_size)), action_layers=config.expert.layers,
                      masked=neuron_count(settings.mask_ratio, config.expert.mlp),
                      suffix=config.suffix_rows, action_width=config.expert.width,
                      with_residual=settings.residual != 'none')
