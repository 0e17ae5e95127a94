# SPDX-License-Identifier: Apache-2.0
"""Action Cache: evaluate only the expert neurons that mattered in the reference."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from rmuscle_core.arena import ReferenceArena


class NeuronFFN:
    """Expert FFN of one policy call on the neurons of the reference in ``arena.slot``.

    With use_residual, what the dropped neurons contributed in the reference is added per token (docs/architecture.md).
    The weights of one mask are gathered once and serve every step of its group: gathering per step costs a
    quarter to two fifths of what the selection saves on a CPU. A CPU computes in float32 whatever the storage dtype,
    since its bfloat16 products are several times slower.
    """

    def __init__(self, arena: ReferenceArena, neurons: int, group_size: int, use_residual: bool) -> None:
        self.arena, self.neurons, self.group_size, self.use_residual = arena, neurons, group_size, use_residual
        self.slot = int(arena.slot)
        self._gathered: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def __call__(self, x: torch.Tensor, mlp, layer: int, step: int = 0) -> torch.Tensor:
        if self.neurons >= mlp.gate.weight.shape[0]:  # nothing is dropped: the dense code path, bit for bit
            return mlp(x)
        gate, up, down = self._weights(mlp, step // self.group_size, layer)
        rows = x.to(gate.dtype)
        y = F.linear(F.gelu(F.linear(rows, gate), approximate='tanh') * F.linear(rows, up), down)
        if self.use_residual:
            y = y + self.arena.residual[self.slot, step, layer]
        return y.to(x.dtype)

    def _weights(self, mlp, group: int, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gate and up [n, W], down [W, n] of one mask, as ``nn.Linear`` stores them."""
        found = self._gathered.get((group, layer))
        if found is None:
            index = self.arena.neurons[self.slot, group, layer, :self.neurons].long()
            dtype = torch.float32 if index.device.type == 'cpu' else mlp.gate.weight.dtype
            found = tuple(linear.weight.index_select(dim, index).to(dtype)
                          for linear, dim in ((mlp.gate, 0), (mlp.up, 0), (mlp.down, 1)))
            self._gathered[group, layer] = found
        return found
