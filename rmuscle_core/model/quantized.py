# SPDX-License-Identifier: Apache-2.0
"""FFN weights in 8 bits (e4m3), one float32 scale per neuron and matrix, computed with in the activations' dtype.

A neuron's weights into and out of it are rows with a scale each, so any subset of neurons is a gather of rows, as the
Action Cache needs. (One scale per output of the down projection instead is no more accurate.) The forward here is the
reference: it widens a whole matrix at every use, which saves memory and costs time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from rmuscle_core.errors import CheckpointError, SettingsError
from rmuscle_core.model.gemma import GeGLU
from rmuscle_kernels.fp8 import E4M3, dequantize, fp8_linear, quantize

if TYPE_CHECKING:
    from rmuscle_core.model.vla import VLA

CAPABILITY = (8, 9)  # first NVIDIA GPUs that convert e4m3 in hardware


class QuantizedLinear(nn.Module):
    """What an FFN uses of a bias-free ``nn.Linear``. q: e4m3 [neurons, width], scale: float32 [neurons].

    to_neurons: whether the neurons are the outputs (gate, up) or the inputs (down).
    """

    def __init__(self, linear: nn.Linear, to_neurons: bool) -> None:
        super().__init__()
        self.in_features, self.out_features, self.to_neurons = linear.in_features, linear.out_features, to_neurons
        rows = linear.weight.detach() if to_neurons else linear.weight.detach().t().contiguous()
        if rows.is_meta:
            q, scale = torch.empty_like(rows, dtype=E4M3), rows.new_empty(len(rows), dtype=torch.float32)
        else:
            q, scale = quantize(rows)
        self.q, self.scale = nn.Parameter(q, requires_grad=False), nn.Parameter(scale, requires_grad=False)

    @property
    def weight(self) -> torch.Tensor:
        """What is stored, as float32 [out, in]; made anew at each access."""
        rows = dequantize(self.q, self.scale)
        return rows if self.to_neurons else rows.t()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out] in x's dtype."""
        if self.to_neurons:
            return fp8_linear(x, self.q, self.scale)
        return F.linear((x.float() * self.scale).to(x.dtype), self.q.to(x.dtype).t())

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """The weights of the neurons in index [n], float32 [n, width]; no others are read."""
        # As bytes: not every backend indexes 8-bit floats.
        q = self.q.view(torch.uint8).index_select(0, index).view(E4M3)
        return dequantize(q, self.scale.index_select(0, index))


class QuantizedGeGLU(GeGLU):
    """A GeGLU made from another, whose weights it does not keep. Raises ValueError when they are not finite."""

    def __init__(self, mlp: GeGLU) -> None:
        nn.Module.__init__(self)  # not GeGLU's, which would allocate whole weights
        self.gate, self.up = QuantizedLinear(mlp.gate, True), QuantizedLinear(mlp.up, True)
        self.down = QuantizedLinear(mlp.down, False)

    def gather(self, index: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> None:
        """Write the weights of the neurons in index [n] into gate and up [n, width] and down [width, n]."""
        for linear, out in ((self.gate, gate), (self.up, up), (self.down, down.t())):
            out.copy_(linear.rows(index))


@torch.no_grad()
def quantize_ffns(model: VLA) -> None:
    """Replace every GeGLU of prefix and expert, one after another: beyond the model's memory it takes one layer's.

    Raises SettingsError on a GPU without e4m3, CheckpointError naming the layer whose weights are not finite.
    """
    require_fp8(model.prefix_weight.device)
    for name, stack in (('prefix', model.prefix), ('expert', model.expert)):
        for i, layer in enumerate(stack.layers):
            if not hasattr(layer, 'mlp'):  # the last prefix layer's cannot reach the actions
                continue
            try:
                layer.mlp = QuantizedGeGLU(layer.mlp)
            except ValueError as error:
                raise CheckpointError(f'the FFN of {name} layer {i}: {error}; set weight_dtype to checkpoint or '
                                      'export the checkpoint again') from error
    model.config = replace(model.config, weight_dtype='fp8')


def require_fp8(device: torch.device) -> None:
    """Raise SettingsError when the device is a GPU without e4m3."""
    if device.type != 'cuda':
        return
    found = torch.cuda.get_device_capability(device)
    if found < CAPABILITY:
        raise SettingsError(f'weight_dtype fp8 needs a GPU of compute capability 8.9 or later, '
                            f'{torch.cuda.get_device_name(device)} has {found[0]}.{found[1]}; set it to checkpoint')
