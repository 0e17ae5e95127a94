# SPDX-License-Identifier: Apache-2.0
"""RMS norm with what stands before it (a gated residual add) and after it (scale and shift), in one launch.

    sum = x + gate * delta            y = sum / sqrt(mean(sum^2) + eps) * (1 + scale) + shift

The plain norm's weight plays the part of scale. Statistics are fp32; sum is rounded to the stream's dtype first, as
it is when the add is a kernel of its own.
"""

from __future__ import annotations

import torch

from rmuscle_kernels.numerics import await_inputs, cast
from rmuscle_kernels.runtime import DTYPES, INTERPRETED, expect, jit, launch, tl, triton, use_triton

MAX_WIDTH = 8192


@jit
def norm_kernel(x, delta, gate, scale, shift, total, y, width, eps, x_stride, delta_stride, total_stride, y_stride,
                WIDTH: tl.constexpr, ADD: tl.constexpr, GATED: tl.constexpr, SHIFTED: tl.constexpr,
                UPCAST: tl.constexpr, EARLY: tl.constexpr):
    await_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, WIDTH)
    mask = col < width
    value = tl.load(x + row * x_stride + col, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        change = tl.load(delta + row * delta_stride + col, mask=mask, other=0.0).to(tl.float32)
        if GATED:
            change *= tl.load(gate + col, mask=mask, other=0.0).to(tl.float32)
        rounded = cast(value + change, total.dtype.element_ty, UPCAST)
        tl.store(total + row * total_stride + col, rounded, mask=mask)
        value = rounded.to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    value *= 1.0 + tl.load(scale + col, mask=mask, other=0.0).to(tl.float32)
    if SHIFTED:
        value += tl.load(shift + col, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + row * y_stride + col, cast(value, y.dtype.element_ty, UPCAST), mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6, impl: str | None = None) -> torch.Tensor:
    """x / rms(x) * (1 + weight). x: [R, W]; weight: [W]."""
    return _norm(x, weight, eps=eps, impl=impl)[1]


def ada_rms_norm(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, *, eps: float = 1e-6,
                 impl: str | None = None) -> torch.Tensor:
    """x / rms(x) * (1 + scale) + shift. x: [R, W]; scale, shift: [W], of one denoise step."""
    return _norm(x, scale, shift, eps=eps, impl=impl)[1]


def add_rms_norm(x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6,
                 impl: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (x + delta, its `rms_norm`)."""
    return _norm(x, weight, delta=delta, eps=eps, impl=impl)


def gated_add_ada_rms_norm(x: torch.Tensor, delta: torch.Tensor, gate: torch.Tensor, scale: torch.Tensor,
                           shift: torch.Tensor, *, eps: float = 1e-6,
                           impl: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (x + gate * delta, its `ada_rms_norm`). gate: [W]."""
    return _norm(x, scale, shift, delta, gate, eps=eps, impl=impl)


def norm_reference(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor | None = None,
                   delta: torch.Tensor | None = None, gate: torch.Tensor | None = None, *,
                   eps: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    """Torch reference of all four: (sum, y)."""
    if delta is not None:
        change = delta.float() if gate is None else delta.float() * gate.float()
        x = (x.float() + change).to(x.dtype)
    value = x.float()
    value = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps) * (1.0 + scale.float())
    return x, (value if shift is None else value + shift.float()).to(x.dtype)


def _norm(x, scale, shift=None, delta=None, gate=None, *, eps, impl) -> tuple[torch.Tensor, torch.Tensor]:
    expect('x', x, (None, None))
    rows, width = x.shape
    if delta is not None:
        expect('delta', delta, (rows, width), x.dtype)
    for name, vector in {'weight or scale': scale, 'shift': shift, 'gate': gate}.items():
        if vector is not None:
            expect(name, vector, (width,), *DTYPES)
    if not use_triton(x, impl):
        return norm_reference(x, scale, shift, delta, gate, eps=eps)
    if width > MAX_WIDTH:
        raise ValueError(f"a norm takes at most {MAX_WIDTH} columns, not {width}; pass impl='reference'")
    y = torch.empty_like(x)
    total = x if delta is None else torch.empty_like(x)
    norm_kernel[(rows,)](
        x, delta, gate, scale, shift, total, y, width, eps, x.stride(0), 0 if delta is None else delta.stride(0),
        total.stride(0), y.stride(0), WIDTH=triton.next_power_of_2(width), ADD=delta is not None,
        GATED=gate is not None, SHIFTED=shift is not None, UPCAST=INTERPRETED, num_warps=4, **launch(x))
    return total, y
