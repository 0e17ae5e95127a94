# SPDX-License-Identifier: Apache-2.0
"""Action Cache: evaluate only the expert neurons that mattered in the reference."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from rmuscle_core.arena import ReferenceArena

Weights = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # gate and up [n, W], down [W, n]


class NeuronFFN:
    """Expert FFN of one policy call on the neurons of the reference in ``arena.slot``.

    With use_residual, what the dropped neurons contributed in the reference is added per token (docs/architecture.md).
    The weights of one mask are gathered once and serve every step of its group: gathering per step costs a
    quarter to two fifths of what the selection saves on a CPU. A CPU computes in float32 whatever the storage dtype,
    since its bfloat16 products are several times slower.

    workspace: layer -> buffers for gathered weights. Handed from call to call it spares each call the mapping of
    fresh memory, a tenth of the FFN's time on a busy CPU; it belongs to one call at a time.
    """

    def __init__(self, arena: ReferenceArena, neurons: int, group_size: int, use_residual: bool,
                 workspace: dict[int, Weights] | None = None) -> None:
        self.arena, self.neurons, self.group_size, self.use_residual = arena, neurons, group_size, use_residual
        self.slot = int(arena.slot)
        self.workspace = {} if workspace is None else workspace
        self._group: dict[int, int] = {}  # layer -> whose mask the workspace holds; steps come in order

    def __call__(self, x: torch.Tensor, mlp, layer: int, step: int = 0) -> torch.Tensor:
        if self.neurons >= mlp.gate.out_features:  # nothing is dropped: the dense code path, bit for bit
            return mlp(x)
        gate, up, down = self._weights(mlp, step // self.group_size, layer)
        rows = x.to(gate.dtype)
        y = F.linear(F.gelu(F.linear(rows, gate), approximate='tanh') * F.linear(rows, up), down)
        if self.use_residual:
            y = y + self.arena.residual[self.slot, step, layer]
        return y.to(x.dtype)

    def _weights(self, mlp, group: int, layer: int) -> Weights:
        """The weights of one mask, laid out as ``nn.Linear`` does."""
        if self._group.get(layer) != group:
            # Ascending, because picking columns in memory order is several times faster than in order of rank.
            index = self.arena.neurons[self.slot, group, layer, :self.neurons].sort().values
            mlp.gather(index, *self._buffers(mlp, layer))
            self._group[layer] = group
        return self.workspace[layer]

    def _buffers(self, mlp, layer: int) -> Weights:
        found = self.workspace.get(layer)
        if found is None or found[0].shape[0] != self.neurons:
            width, n, states = mlp.gate.in_features, self.neurons, self.arena.y
            dtype = torch.float32 if states.device.type == 'cpu' else states.dtype
            found = tuple(states.new_empty(shape, dtype=dtype) for shape in ((n, width), (n, width), (width, n)))
            self.workspace[layer] = found
        return found
