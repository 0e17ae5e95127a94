# SPDX-License-Identifier: Apache-2.0
"""Reconstruction of what the neurons outside a reference's mask contributed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rmuscle_core.arena import ReferenceArena


class ResidualFFN:
    """Dense expert FFN that keeps R[step, layer] = sum over dropped neurons of a[:, j] * down[:, j] in a slot.

    Dropped are all but the first ``neurons[group][layer]`` of the mask already written to ``arena.neurons[slot]``.
    """

    def __init__(self, arena: ReferenceArena, slot: int, neurons: Sequence[Sequence[int]], group_size: int,
                 checkpoint: Callable[[], None]) -> None:
        self.arena, self.slot, self.neurons, self.group_size = arena, slot, neurons, group_size
        self.checkpoint = checkpoint

    def __call__(self, x: torch.Tensor, mlp, layer: int, step: int = 0) -> torch.Tensor:
        self.checkpoint()
        group = step // self.group_size
        count = self.neurons[group][layer]
        if count >= mlp.gate.out_features:  # a call evaluates them all
            return mlp(x)
        a = mlp.activations(x)
        kept = self.arena.neurons[self.slot, group, layer, :count].long()
        dropped = a.index_fill(-1, kept, 0)
        self.arena.residual[self.slot, step, layer].copy_(mlp.down(dropped)[0])
        return mlp.down(a)
