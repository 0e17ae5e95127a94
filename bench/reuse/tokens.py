# SPDX-License-Identifier: Apache-2.0
"""Other ways for the Context Cache to choose tokens, and to answer for those it does not recompute."""

from __future__ import annotations

import math

import numpy as np
import torch
from calls import SLOTS, Bench, Tally

from rmuscle_core.arena import ReferenceArena
from rmuscle_core.engine.plan import CallPlan
from rmuscle_core.ffn import DenseFFN

RATIOS = (0.05, 0.1, 0.15, 0.25)
THRESHOLDS = (0.03, 0.06, 0.12)  # of a token's relative change
RANK, RIDGE = 16, 1e-2


class Nearest:
    """What the policy does: per layer the k most changed tokens are recomputed, others reuse the nearest reference."""

    def __init__(self, arena: ReferenceArena, k: int) -> None:
        self.arena, self.k, self.recomputed = arena, k, []

    def __call__(self, x: torch.Tensor, mlp, layer: int, step: int = 0) -> torch.Tensor:
        rows, tokens = x[0], self.arena.shape.tokens
        now, before, after = rows[:tokens], self.arena.x[:SLOTS, layer], self.arena.y[:SLOTS, layer]
        y, change = self.reuse(now, before, after, layer)
        chosen = self.choose(change / (now * now).sum(-1), layer)
        self.recomputed.append(len(chosen) / tokens)
        index = torch.cat([chosen, torch.arange(tokens, len(rows))])
        return torch.cat([y, rows[tokens:]]).index_copy_(0, index, mlp(rows[index]))[None]

    def reuse(self, now, before, after, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs [T, D] without recomputing, and by how much each token's input changed [T]."""
        change, nearest = ((now - before) ** 2).sum(-1).min(0)
        return after[nearest, torch.arange(len(now))], change

    def choose(self, change: torch.Tensor, layer: int) -> torch.Tensor:
        return change.topk(self.k).indices


class Threshold(Nearest):
    """All tokens that changed by more than a limit, so that a quiet call recomputes fewer; at most half of them."""

    def __init__(self, arena: ReferenceArena, limit: float) -> None:
        super().__init__(arena, arena.shape.tokens // 2)
        self.limit = limit

    def choose(self, change: torch.Tensor, layer: int) -> torch.Tensor:
        return change.topk(min(self.k, int((change > self.limit).sum()))).indices


class Shared(Nearest):
    """The set chosen in the first layer serves all."""

    def choose(self, change: torch.Tensor, layer: int) -> torch.Tensor:
        if layer == 0:
            self.chosen = super().choose(change, layer)
        return self.chosen


class Tilted(Nearest):
    """Three times as many in the first layer as in the last, evenly in between."""

    def choose(self, change: torch.Tensor, layer: int) -> torch.Tensor:
        layers = self.arena.shape.layers
        return change.topk(max(1, round(self.k * (1.5 - layer / max(layers - 1, 1))))).indices


class Between(Nearest):
    """The two nearest references span a line; the output is taken at the point of it nearest to the token's input."""

    def reuse(self, now, before, after, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        order, each = ((now - before) ** 2).sum(-1).argsort(0), torch.arange(len(now))
        first, along = before[order[0], each], before[order[1], each] - before[order[0], each]
        where = ((now - first) * along).sum(-1, keepdim=True) / (along * along).sum(-1, keepdim=True).clamp_min(1e-6)
        where = where.clamp(0, 1)
        y = after[order[0], each] + where * (after[order[1], each] - after[order[0], each])
        return y, ((now - first - where * along) ** 2).sum(-1)


class FirstOrder(Nearest):
    """The reused output plus what a linear map, fitted to the library, makes of the change of the input."""

    def __init__(self, arena: ReferenceArena, k: int, maps: list[torch.Tensor]) -> None:
        super().__init__(arena, k)
        self.maps = maps

    def reuse(self, now, before, after, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        change, nearest = ((now - before) ** 2).sum(-1).min(0)
        each = torch.arange(len(now))
        return after[nearest, each] + (now - before[nearest, each]) @ self.maps[layer], change


@torch.inference_mode()
def fit_maps(bench: Bench) -> list[torch.Tensor]:
    """Per layer the rank-16 map [D, D] that tells the change of a token's output from that of its input best."""
    arena, width = bench.engine.arena, bench.config.prefix.width
    inputs = torch.zeros(arena.shape.layers, width, width, dtype=torch.float64)
    outputs, before = inputs.clone(), None
    for reference in bench.library:
        if before is not None and before.id.episode == reference.id.episode:
            for slot, given in enumerate((reference, *bench.nearest(reference, 1), before)):
                bench.expand(given, slot, CallPlan())
            change, nearest = ((arena.x[:1] - arena.x[1:SLOTS]) ** 2).sum(-1).min(0)  # [L, T]
            for layer in range(arena.shape.layers):
                kept = change[layer].argsort()[:round(0.85 * arena.shape.tokens)]  # the others are recomputed
                slots = 1 + nearest[layer, kept]
                dx, dy = ((part[0, layer, kept] - part[slots, layer, kept]).double() for part in (arena.x, arena.y))
                inputs[layer] += dx.T @ dx
                outputs[layer] += dx.T @ dy
        before = reference
    return [_low_rank(xx, xy) for xx, xy in zip(inputs, outputs)]


def _low_rank(xx: torch.Tensor, xy: torch.Tensor) -> torch.Tensor:
    """Reduced-rank regression with a ridge."""
    full = torch.linalg.solve(xx + RIDGE * xx.diagonal().mean() * torch.eye(len(xx), dtype=xx.dtype), xy)
    directions = torch.linalg.eigh(full.T @ xx @ full).eigenvectors[:, -RANK:]
    return (full @ directions @ directions.T).float()


@torch.inference_mode()
def measure(bench: Bench) -> list[list[str | float]]:
    """Rows of Tally: every way at every ratio, denoising dense."""
    tally, arena, maps = Tally(), bench.engine.arena, fit_maps(bench)
    for call in bench.calls():
        for slot, reference in enumerate(call.references):
            bench.expand(reference, slot, CallPlan())
        ways = {}
        for ratio in RATIOS:
            k = math.ceil(ratio * arena.shape.tokens)
            ways |= {f'fixed number {ratio:g}': Nearest(arena, k),
                     f'one set for all layers {ratio:g}': Shared(arena, k),
                     f'more in early layers {ratio:g}': Tilted(arena, k),
                     f'between two references {ratio:g}': Between(arena, k),
                     f'first-order correction {ratio:g}': FirstOrder(arena, k, maps)}
        ways |= {f'threshold {limit:g}': Threshold(arena, limit) for limit in THRESHOLDS}
        for name, way in ways.items():
            tally.add(name, bench.error(call, way, DenseFFN()), float(np.mean(way.recomputed)))
    return tally.rows()
