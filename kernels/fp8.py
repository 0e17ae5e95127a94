# SPDX-License-Identifier: Apache-2.0
"""Weight-only 8-bit storage: e4m3 values with one fp32 scale per output channel."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rmuscle_kernels.runtime import expect

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (e4m3 [O, I], scale fp32 [O]) of a weight [O, I]; each channel's largest value maps to 448.

    Raises ValueError for a weight that is not finite: the format would store it as a NaN or a wrong large value.
    """
    expect('weight', weight, (None, None))
    largest = weight.float().abs().amax(dim=1)
    if not bool(largest.isfinite().all()):
        channel = int((~largest.isfinite()).nonzero()[0])
        raise ValueError(f'weight must be finite to be quantised; output channel {channel} is not')
    scale = torch.where(largest > 0, largest / LARGEST, torch.ones_like(largest))
    return (weight.float() / scale[:, None]).clamp(-LARGEST, LARGEST).to(E4M3), scale


def dequantize(q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the weight [O, I] that (q, scale) stands for."""
    return (q.float() * scale[:, None]).to(dtype)


def fp8_linear(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x [R, I] @ weight^T -> [R, O] in x's dtype; the scale is applied to the product, once per output."""
    return (F.linear(x, q.to(x.dtype)).float() * scale).to(x.dtype)
