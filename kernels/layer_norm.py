# SPDX-License-Identifier: Apache-2.0
"""LayerNorm with the biased residual add that stands before it, in one launch.

    sum = x + delta + bias            y = (sum - mean) / sqrt(variance + eps) * weight + shift

The bias is that of the linear layer delta comes from, which then is a plain product. Statistics are fp32; sum is
rounded to the stream's dtype first.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rmuscle_kernels.numerics import await_inputs, cast
from rmuscle_kernels.runtime import DTYPES, INTERPRETED, expect, jit, launch, tl, triton, use_triton

MAX_WIDTH = 8192


@jit
def layer_norm_kernel(x, delta, bias, weight, shift, total, y, width, eps, WIDTH: tl.constexpr, UPCAST: tl.constexpr,
                      EARLY: tl.constexpr):
    await_inputs(EARLY)
    col = tl.arange(0, WIDTH)
    mask = col < width
    place = tl.program_id(0) * width + col
    value = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    value += tl.load(delta + place, mask=mask, other=0.0).to(tl.float32)
    value += tl.load(bias + col, mask=mask, other=0.0).to(tl.float32)
    rounded = cast(value, total.dtype.element_ty, UPCAST)
    tl.store(total + place, rounded, mask=mask)
    value = rounded.to(tl.float32)
    centred = tl.where(mask, value - tl.sum(value, axis=0) / width, 0.0)
    value = centred * tl.rsqrt(tl.sum(centred * centred, axis=0) / width + eps)
    value = value * tl.load(weight + col, mask=mask, other=0.0).to(tl.float32)
    value += tl.load(shift + col, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + place, cast(value, y.dtype.element_ty, UPCAST), mask=mask)


def add_layer_norm(x: torch.Tensor, delta: torch.Tensor, bias: torch.Tensor, weight: torch.Tensor,
                   shift: torch.Tensor, *, eps: float = 1e-6,
                   impl: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (x + delta + bias, its LayerNorm), both [R, W]. x, delta: [R, W], contiguous; bias, weight, shift: [W].

    Raises ValueError for shapes that do not fit or more than 8192 columns.
    """
    expect('x', x, (None, None))
    rows, width = x.shape
    expect('delta', delta, (rows, width), x.dtype)
    for name, vector in {'bias': bias, 'weight': weight, 'shift': shift}.items():
        expect(name, vector, (width,), *DTYPES)
    if not use_triton(x, impl):
        return add_layer_norm_reference(x, delta, bias, weight, shift, eps=eps)
    if width > MAX_WIDTH or not (x.is_contiguous() and delta.is_contiguous()):
        raise ValueError(f'the kernel takes contiguous rows of at most {MAX_WIDTH} columns, not {width} with strides '
                         f"{x.stride()} and {delta.stride()}; pass impl='reference'")
    total, y = torch.empty_like(x), torch.empty_like(x)
    layer_norm_kernel[(rows,)](x, delta, bias, weight, shift, total, y, width, eps,
                               WIDTH=triton.next_power_of_2(width), UPCAST=INTERPRETED, num_warps=4, **launch(x))
    return total, y


def add_layer_norm_reference(x: torch.Tensor, delta: torch.Tensor, bias: torch.Tensor, weight: torch.Tensor,
                             shift: torch.Tensor, *, eps: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    """Torch reference of `add_layer_norm`."""
    total = (x.float() + delta.float() + bias.float()).to(x.dtype)
    return total, F.layer_norm(total.float(), total.shape[-1:], weight.float(), shift.float(), eps).to(x.dtype)
