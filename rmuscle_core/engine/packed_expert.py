# SPDX-License-Identifier: Apache-2.0
"""Denoising on packed weights: any FFN of the seam, or, where it only chooses neurons, with all around it folded in."""

from __future__ import annotations

import torch

from rmuscle_core.engine.packed_cache import PackedCache
from rmuscle_core.engine.packed_ffn import PackedNeurons
from rmuscle_core.engine.slot_ffn import SlotNeuronFFN
from rmuscle_core.model import VLA
from rmuscle_core.model.guidance import Guidance
from rmuscle_core.model.prefix import FFN
from rmuscle_kernels.attention import attend
from rmuscle_kernels.layer import Stream, add_neuron_ffn, add_project, norm_qkv_rope
from rmuscle_kernels.neurons import neuron_workspace
from rmuscle_kernels.norms import ada_rms_norm, gated_add_ada_rms_norm
from rmuscle_kernels.rope import rope
from rmuscle_kernels.step import denoise_step

TALL = 64  # rows of the attention output's scratch are whole tiles of the kernel that reads it


class PackedExpert:
    """The action expert of a VLA; its scratch serves one denoising at a time through chosen neurons."""

    def __init__(self, model: VLA) -> None:
        self.expert, self.config = model.expert, model.config
        sizes, rows = self.config.expert, self.config.suffix_rows
        self.modulations = model.modulations()
        make = {'device': self.modulations.device, 'dtype': self.config.compute_dtype}
        self.workspace = neuron_workspace(rows, sizes.width, max(sizes.mlp, sizes.heads * sizes.head_dim), **make)
        self.ffns = [PackedNeurons(layer.mlp, self.workspace) for layer in self.expert.layers]
        self.out_t = [_transposed(layer.attention.out) for layer in self.expert.layers]
        self.offsets = [self._offsets(i) for i in range(sizes.layers)]
        # rows beyond the suffix are read, and never used
        self.attended = torch.zeros(-(-rows // TALL) * TALL, sizes.heads * sizes.head_dim, **make)
        self.first = [torch.zeros(rows, sizes.width, **make) for _ in range(2)]
        self.squares = torch.zeros(1, rows, device=make['device'])

    def denoise(self, cache: PackedCache, noise: torch.Tensor, ffn: FFN,
                guidance: Guidance | None = None) -> torch.Tensor:
        """noise float32 [1,H,A_pad] -> normalised actions [1,H,A_pad], by Euler steps from t = 1 to 0."""
        if isinstance(ffn, SlotNeuronFFN) and guidance is None:
            return self._denoise_chosen(cache, noise[0].clone(), ffn)[None]
        x, steps = noise[0], self.config.steps
        for step in range(steps):
            velocity = self.velocity(cache, x, step, ffn)
            if guidance is not None:
                velocity = guidance(velocity, x, step, steps)
            x = torch.sub(x, velocity, alpha=1 / steps)
        return x[None]

    def velocity(self, cache: PackedCache, x: torch.Tensor, step: int, ffn: FFN) -> torch.Tensor:
        """d x / d t at x [H,A_pad], float32, at denoise step ``step``."""
        expert, heads, modulations = self.expert, self.config.expert.heads, self.modulations[step]
        x = expert.action_in(x).to(self.config.compute_dtype)
        scale, shift, gate = modulations[0].chunk(3)
        h = ada_rms_norm(x, scale, shift)
        for i, layer in enumerate(expert.layers):
            k, v = cache.k[i], cache.v[i]
            q, _, _ = rope(layer.attention.qkv(h), cache.cos, cache.sin, heads, cache=(k, v))
            y = layer.attention.out(attend(q, k, v, cache.kv_len))
            scale, shift, next_gate = modulations[2 * i + 1].chunk(3)
            x, h = gated_add_ada_rms_norm(x, y, gate, scale, shift)
            y = ffn(h[None], self.ffns[i], i, step)[0]
            gate = next_gate
            scale, shift, next_gate = modulations[2 * i + 2].chunk(3)
            x, h = gated_add_ada_rms_norm(x, y, gate, scale, shift)
            gate = next_gate
        return expert.action_out(h.float())

    def _denoise_chosen(self, cache: PackedCache, actions: torch.Tensor, ffn: SlotNeuronFFN) -> torch.Tensor:
        """One launch between steps, six in a layer, two more where it anchors its residual.

        actions [H,A_pad] are changed in place and returned.
        """
        expert, steps = self.expert, self.config.steps
        into, off = ((linear.weight, linear.bias) for linear in (expert.action_in, expert.action_out))
        x, scaled = self.first
        leave = {}
        for step in range(steps):
            modulations = self.modulations[step]
            scale = modulations[0].chunk(3)[0]
            denoise_step(actions, x, 1 / steps, action_in=into, following=(scale, scaled, self.squares), **leave)
            stream = Stream(x, scaled, self.squares)
            for layer in range(len(expert.layers)):
                stream = self._layer(cache, stream, modulations, layer, step, ffn)
            x, scaled = stream.x, stream.scaled
            leave = {'norm': tuple(modulations[-1].chunk(3)[:2]), 'action_out': off}
        denoise_step(actions, x, 1 / steps, **leave)
        return actions

    def _layer(self, cache: PackedCache, stream: Stream, modulations: torch.Tensor, i: int, step: int,
               ffn: SlotNeuronFFN) -> Stream:
        qkv_offset, ffn_offset = self.offsets[i]
        (_, _, gate), (scale, _, ffn_gate), (next_scale, _, _) = (m.chunk(3) for m in modulations[2 * i:2 * i + 3])
        rows, packed = stream.x.shape[0], self.ffns[i]
        q = norm_qkv_rope(stream, qkv_offset[step], self.expert.layers[i].attention.qkv.weight, cache.cos, cache.sin,
                          self.config.expert.heads, cache.k[i], cache.v[i])
        attend(q, cache.k[i], cache.v[i], cache.kv_len, out=self.attended[:rows])
        stream = add_project(stream, self.attended, self.out_t[i], gate, scale, self.workspace)
        stream = add_neuron_ffn(stream, packed.gate_up, packed.down_t, ffn_offset[step], ffn_gate, next_scale,
                                self.workspace, *ffn.choice(i, step))
        ffn.anchor(packed, i, step)
        return stream

    def _offsets(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What the shifts of a layer's two norms become after the products that follow: [K, qkv rows], [K, N, 2]."""
        width = self.config.expert.width
        attention, ffn = (self.modulations[:, 2 * i + j, width:2 * width] for j in range(2))
        weight, gate_up = self.expert.layers[i].attention.qkv.weight.float(), self.ffns[i].gate_up.float()
        return attention @ weight.t(), torch.einsum('kw,ncw->knc', ffn, gate_up).contiguous()


def _transposed(linear: torch.nn.Linear) -> torch.Tensor:
    """The weight as [in, out], contiguous; the layer keeps it as a view."""
    weight = linear.weight.t().contiguous()
    linear.weight.data = weight.t()
    return weight
