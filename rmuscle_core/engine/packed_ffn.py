# SPDX-License-Identifier: Apache-2.0
"""FFN weights in the layouts that the kernels read; what an FFN of the seam gets as ``mlp`` on the packed path.

The original nn.Linear weights become views of the packed tensors, so code that uses gate, up and down still works and
memory does not double.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rmuscle_core.model.gemma import GeGLU
from rmuscle_kernels.geglu import gather_geglu, pack_gate_up
from rmuscle_kernels.neurons import NeuronWorkspace, neuron_ffn, pack_neurons


class PackedGeGLU:
    """A prefix FFN: rows are chosen while they are read, gate and up never reach memory."""

    def __init__(self, mlp: GeGLU) -> None:
        self.gate, self.up, self.down, self.activations = mlp.gate, mlp.up, mlp.down, mlp.activations
        self.gate_up = pack_gate_up(mlp.gate.weight, mlp.up.weight)
        mlp.gate.weight.data, mlp.up.weight.data = self.gate_up.chunk(2)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[1, rows, D] -> [1, rows, D]."""
        return self.rows(x[0])[None]

    def rows(self, x: torch.Tensor, index: torch.Tensor | None = None) -> torch.Tensor:
        """FFN output [R, D] of the rows of x [rows, D] that index int32 [R] names, or of all."""
        return F.linear(gather_geglu(x, self.gate_up, index), self.down.weight)


class PackedNeurons:
    """An expert FFN, neuron by neuron: any subset is read at full bandwidth.

    One call at a time, since all share the scratch; the graphs of one stream keep to that.
    """

    def __init__(self, mlp: GeGLU, workspace: NeuronWorkspace) -> None:
        self.gate, self.up, self.down, self.activations = mlp.gate, mlp.up, mlp.down, mlp.activations
        self.gate_up, self.down_t = pack_neurons(mlp.gate.weight, mlp.up.weight, mlp.down.weight)
        mlp.gate.weight.data, mlp.up.weight.data = self.gate_up.unbind(1)
        mlp.down.weight.data = self.down_t.t()
        self.workspace = workspace

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[1, H, W] -> [1, H, W], every neuron."""
        return neuron_ffn(x[0], self.gate_up, self.down_t, workspace=self.workspace)[None]

    def chosen(self, x: torch.Tensor, neurons: torch.Tensor | None, slot: torch.Tensor | None, n: int | None,
               residual: torch.Tensor | None) -> torch.Tensor:
        """[H, W] -> [H, W] from the first n of the neurons int32 [slots, masked] of a slot, on top of its residual."""
        return neuron_ffn(x, self.gate_up, self.down_t, neurons, slot, n, residual, workspace=self.workspace)

    def left_out(self, kept: torch.Tensor, out: torch.Tensor) -> None:
        """Write to out [H, W] what all neurons but those in kept (int64 [n]) gave in this FFN's call just made.

        That call evaluated every neuron; its activations, still in the workspace, are lost.
        """
        hidden = self.workspace.hidden[:out.shape[0], :self.down_t.shape[0]]
        torch.mm(hidden.index_fill_(1, kept, 0), self.down_t, out=out)
