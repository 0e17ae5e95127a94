# SPDX-License-Identifier: Apache-2.0
"""Keys and values between prefill and denoise on the packed path."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PackedCache:
    """What prefill leaves for denoise, in memory that is written again by the next prefill into it.

    k, v: [layers, suffix rows + room, head_dim]. cos, sin: float32 [suffix rows, head_dim / 2], the suffix's angles.
    n_valid, kv_len: int32 [1], valid prefix rows, and those plus the suffix rows.
    """

    k: torch.Tensor
    v: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    n_valid: torch.Tensor
    kv_len: torch.Tensor
