# SPDX-License-Identifier: Apache-2.0
"""Reconstruction of a reference's prefix states."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rmuscle_core.arena import ReferenceArena


class Interrupted(Exception):
    """A policy call is due: the reconstruction stops at this layer boundary."""


class RecordFFN:
    """Dense prefix FFN that keeps the visual rows' input and output in a slot of the arena.

    checkpoint() is called before each layer and between its products, and may raise Interrupted; the slot is then
    incomplete, not the model.
    """

    def __init__(self, arena: ReferenceArena, slot: int, checkpoint: Callable[[], None]) -> None:
        self.arena, self.slot, self.checkpoint = arena, slot, checkpoint

    def __call__(self, x: torch.Tensor, mlp, layer: int, step: int = 0) -> torch.Tensor:
        self.checkpoint()
        a, tokens = mlp.activations(x), self.arena.shape.tokens
        self.checkpoint()
        y = mlp.down(a)
        self.checkpoint()
        self.arena.x[self.slot, layer].copy_(self.arena.comparable(x[0, :tokens]))
        self.arena.y[self.slot, layer].copy_(y[0, :tokens])
        return y
