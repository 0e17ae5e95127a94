# SPDX-License-Identifier: Apache-2.0
"""Action Cache: evaluate only the expert neurons that mattered in the reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from rmuscle_core.arena import ReferenceArena

Weights = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # gate and up [n, W], down [W, n]


class NeuronFFN:
    """Expert FFN of one policy call on the neurons of the reference in ``arena.slot``.

    neurons: how many of its ranking, [mask group][layer].

    residual says what is added, row by row, for the neurons left out: 'reference', their contribution R in the
    reference; 'anchored', their contribution at the first step of the group, which is evaluated densely, moved on by
    how R changed since; 'none' (the paper). See docs/concepts.md.

    The weights of one mask are gathered once and serve every step of its group: gathering per step costs a
    quarter to two fifths of what the selection saves on a CPU. A CPU computes in float32 whatever the storage dtype,
    since its bfloat16 products are several times slower.

    workspace: layer -> buffer for gathered weights. Handed from call to call it spares each call the mapping of
    fresh memory, a tenth of the FFN's time on a busy CPU; it belongs to one call at a time.
    """

    def __init__(self, arena: ReferenceArena, neurons: Sequence[Sequence[int]], group_size: int, residual: str,
                 workspace: dict[int, torch.Tensor] | None = None) -> None:
        self.arena, self.neurons, self.group_size, self.residual = arena, neurons, group_size, residual
        self.slot = int(arena.slot)
        self.workspace = {} if workspace is None else workspace
        self._anchor: dict[int, torch.Tensor] = {}  # layer -> what is added to R of the steps of this group
        # layer -> group, mask and weights that the workspace holds; steps come in order
        self._group: dict[int, tuple[int, torch.Tensor, Weights]] = {}

    def __call__(self, x: torch.Tensor, mlp, layer: int, step: int = 0) -> torch.Tensor:
        group = step // self.group_size
        count = self.neurons[group][layer]
        if count >= mlp.gate.out_features:  # nothing is dropped: the dense code path, bit for bit
            return mlp(x)
        index, (gate, up, down) = self._weights(mlp, group, layer, count)
        if self.residual == 'anchored' and step % self.group_size == 0:
            return self._anchored_step(x, mlp, layer, step, index, down)
        rows = x.to(gate.dtype)
        y = F.linear(F.gelu(F.linear(rows, gate), approximate='tanh') * F.linear(rows, up), down)
        if self.residual != 'none':
            y = y + self._dropped(layer, step)
        return y.to(x.dtype)

    def _anchored_step(self, x: torch.Tensor, mlp, layer: int, step: int, index: torch.Tensor,
                       down: torch.Tensor) -> torch.Tensor:
        """Every neuron; keeps the part of the result that comes from those the rest of the group leaves out."""
        a = mlp.activations(x)
        y = mlp.down(a)
        dropped = y - F.linear(a.index_select(-1, index).to(down.dtype), down).to(y.dtype)
        self._anchor[layer] = dropped - self.arena.residual[self.slot, step, layer]
        return y

    def _dropped(self, layer: int, step: int) -> torch.Tensor:
        stored = self.arena.residual[self.slot, step, layer]
        return stored if self.residual == 'reference' else stored + self._anchor[layer]

    def _weights(self, mlp, group: int, layer: int, count: int) -> tuple[torch.Tensor, Weights]:
        """The neurons of one mask and their weights, laid out as ``nn.Linear`` does."""
        if self._group.get(layer, (None,))[0] != group:
            # Ascending, because picking columns in memory order is several times faster than in order of rank.
            index = self.arena.neurons[self.slot, group, layer, :count].sort().values
            weights = self._buffers(mlp, layer, count)
            mlp.gather(index, *weights)
            self._group[layer] = (group, index, weights)
        return self._group[layer][1:]

    def _buffers(self, mlp, layer: int, count: int) -> Weights:
        found, width, states = self.workspace.get(layer), mlp.gate.in_features, self.arena.y
        if found is None or found.shape[1] < count * width:  # room for the largest group of this layer
            most = max(n for n in (row[layer] for row in self.neurons) if n < mlp.gate.out_features)
            dtype = torch.float32 if states.device.type == 'cpu' else states.dtype
            found = self.workspace[layer] = states.new_empty(3, most * width, dtype=dtype)
        gate, up, down = found[:, :count * width]
        return gate.view(count, width), up.view(count, width), down.view(width, count)
