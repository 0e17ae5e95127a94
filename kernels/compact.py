# SPDX-License-Identifier: Apache-2.0
"""Copy the neurons that a reference names next to each other, for matmuls that cannot gather.

A mask is known before a call begins and serves a group of denoise steps, so a stream of its own can copy while the
prefill keeps the arithmetic units, not the memory, busy. The copy is then read with no index in the way: by cuBLAS, or
by the kernels of neurons.py with ``neurons=None``.
"""

from __future__ import annotations

import torch

from rmuscle_kernels.numerics import await_inputs
from rmuscle_kernels.runtime import expect, jit, launch, tl, triton, use_triton


@jit
def compact_kernel(gate_up, down, neurons, slot, out_gate_up, out_down, n, width, slot_stride, group_stride,
                   PADDED: tl.constexpr, EARLY: tl.constexpr):
    await_inputs(EARLY)
    place = tl.program_id(0)
    group = tl.program_id(1)
    neuron = tl.load(neurons + tl.load(slot).to(tl.int64) * slot_stride + group * group_stride + place)
    target = group * n + place
    col = tl.arange(0, PADDED)
    mask = col < width
    gate = tl.load(gate_up + neuron * (2 * width) + col, mask=mask)
    up = tl.load(gate_up + neuron * (2 * width) + width + col, mask=mask)
    column = tl.load(down + neuron * width + col, mask=mask)
    tl.store(out_gate_up + target * (2 * width) + col, gate, mask=mask)
    tl.store(out_gate_up + target * (2 * width) + width + col, up, mask=mask)
    tl.store(out_down + target * width + col, column, mask=mask)


def compact_neurons(gate_up: torch.Tensor, down_t: torch.Tensor, neurons: torch.Tensor, slot: torch.Tensor, n: int, *,
                    out: tuple[torch.Tensor, torch.Tensor] | None = None,
                    impl: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The first n neurons of a slot in every group, as (gate_up [G, n, 2, W], down_t [G, n, W]); bit for bit.

    gate_up: [N, 2, W], down_t: [N, W], one layer's, see `neurons.pack_neurons`. neurons: int32 [slots, G, n_mask], any
    strides in the first two dimensions, not checked for range (that would sync). slot: int32 of one element, on the
    device. 6 W bytes a neuron and group in 16 bits: 453 MB for 2048 neurons, two groups and pi0.5's 18 layers.
    Raises ValueError for shapes that do not fit or n outside [0, n_mask].
    """
    expect('gate_up', gate_up, (None, 2, None))
    total, _, width = gate_up.shape
    expect('down_t', down_t, (total, width), gate_up.dtype)
    expect('neurons', neurons, (None, None, None), torch.int32)
    groups = neurons.shape[1]
    if not 0 <= n <= neurons.shape[2]:
        raise ValueError(f'n must lie in [0, {neurons.shape[2]}], the neurons a reference ranks, not {n}')
    if out is None:
        out = gate_up.new_empty(groups, n, 2, width), down_t.new_empty(groups, n, width)
    expect('out[0]', out[0], (groups, n, 2, width), gate_up.dtype)
    expect('out[1]', out[1], (groups, n, width), gate_up.dtype)
    if not all(tensor.is_contiguous() for tensor in (gate_up, down_t, *out)):
        raise ValueError('gate_up, down_t and out must be contiguous; make the weights with pack_neurons')
    if not use_triton(gate_up, impl):
        for mine, kept in zip(out, compact_neurons_reference(gate_up, down_t, neurons, slot, n)):
            mine.copy_(kept)
    elif n:
        compact_kernel[(n, groups)](gate_up, down_t, neurons, slot, *out, n, width, neurons.stride(0),
                                    neurons.stride(1), PADDED=triton.next_power_of_2(width), num_warps=4,
                                    **launch(gate_up))
    return out


def compact_neurons_reference(gate_up: torch.Tensor, down_t: torch.Tensor, neurons: torch.Tensor, slot: torch.Tensor,
                              n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Torch reference of `compact_neurons`."""
    chosen = neurons.index_select(0, slot)[0, :, :n]
    return gate_up[chosen], down_t[chosen]
