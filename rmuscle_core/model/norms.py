# SPDX-License-Identifier: Apache-2.0
"""RMS normalisation and the residual additions around it, statistics in float32.

Each function is one formula, so that a fused kernel with the same signature can stand in for it. ``x`` and ``delta``
are [..., rows, width]; weight, scale, shift and gate broadcast against them.
"""

from __future__ import annotations

import torch

EPS = 1e-6


def _normalised(x: torch.Tensor) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x / rms(x) * (1 + weight)`` in x's dtype."""
    return (_normalised(x) * (1.0 + weight.float())).to(x.dtype)


def add_rms_norm(x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x + delta`` and its rms_norm."""
    x = x + delta
    return x, rms_norm(x, weight)


def ada_rms_norm(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """``x / rms(x) * (1 + scale) + shift`` in x's dtype."""
    return (_normalised(x) * (1.0 + scale.float()) + shift.float()).to(x.dtype)


def gated_add_ada_rms_norm(x: torch.Tensor, delta: torch.Tensor, gate: torch.Tensor, scale: torch.Tensor,
                           shift: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x + delta * gate`` and its ada_rms_norm; the gate is rounded to x's dtype first, as LeRobot does."""
    x = x + delta * gate.to(x.dtype)
    return x, ada_rms_norm(x, scale, shift)
