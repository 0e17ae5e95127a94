# SPDX-License-Identifier: Apache-2.0
"""What the prefix model and the action expert have in common: rotary positions, attention, GeGLU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from rmuscle_core.model.config import ModelConfig, TransformerConfig

ROPE_THETA = 10000.0


def rope_tables(config: ModelConfig, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [max_rows, head_dim / 2] over half-split rotary pairs."""
    half = config.prefix.head_dim // 2
    frequency = 1.0 / ROPE_THETA ** (torch.arange(half, dtype=torch.float32, device=device) / half)
    if config.rounded_rope:
        # Casting a LeRobot model to bfloat16 casts this buffer with it; its weights have only ever seen these.
        frequency = frequency.to(torch.bfloat16).float()
    angle = torch.arange(config.max_rows, dtype=torch.float32, device=device)[:, None] * frequency
    return angle.cos().to(config.rope_dtype), angle.sin().to(config.rope_dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [..., rows, head_dim] by tables [..., rows, head_dim / 2]; the result has x's dtype."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


class Attention(nn.Module):
    """Multi-query attention with one packed projection: query heads first, then keys, then values.

    live: False in the last prefix layer, of which only keys and values reach the actions.
    """

    def __init__(self, config: TransformerConfig, dtype: torch.dtype, live: bool = True) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads if live else 0, config.kv_heads, config.head_dim
        rows = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv = nn.Linear(config.width, rows, bias=False, dtype=dtype)
        if live:
            self.out = nn.Linear(self.heads * self.head_dim, config.width, bias=False, dtype=dtype)

    def project(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """x [B,rows,width] -> rotated q [B,heads,rows,head_dim], rotated k and v [B,kv_heads,rows,head_dim]."""
        packed = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        rotated = rotate(packed[:, :self.heads + self.kv_heads], cos, sin)
        return rotated[:, :self.heads], rotated[:, self.heads:], packed[:, self.heads + self.kv_heads:]

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Return [B,rows,width]. mask: bool, broadcasts to [B, kv_heads, heads / kv_heads * rows, keys]."""
        # Heads that share a key are extra query rows: nothing of K and V is repeated.
        folded = q.reshape(q.shape[0], self.kv_heads, -1, self.head_dim)
        y = F.scaled_dot_product_attention(folded, k, v, attn_mask=mask)
        return self.out(y.reshape(q.shape).transpose(1, 2).flatten(2))


class GeGLU(nn.Module):
    """``down(gelu_tanh(gate x) * (up x))``: the FFN that every cache of this project stands in for."""

    def __init__(self, config: TransformerConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.mlp, bias=False, dtype=dtype)
        self.up = nn.Linear(config.width, config.mlp, bias=False, dtype=dtype)
        self.down = nn.Linear(config.mlp, config.width, bias=False, dtype=dtype)

    def activations(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width] -> [..., mlp], the neurons before the down projection."""
        return F.gelu(self.gate(x), approximate='tanh') * self.up(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.activations(x))

    def gather(self, index: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> None:
        """Copy the weights of the neurons in index [n] into gate and up [n, width] and down [width, n]."""
        for linear, dim, out in ((self.gate, 0, gate), (self.up, 0, up), (self.down, 1, down)):
            if out.dtype == linear.weight.dtype:
                torch.index_select(linear.weight, dim, index, out=out)
            else:
                out.copy_(linear.weight.index_select(dim, index))


class Layer(nn.Module):
    """One transformer layer without its norms, which differ between prefix and expert."""

    def __init__(self, config: TransformerConfig, dtype: torch.dtype, live: bool = True) -> None:
        super().__init__()
        self.attention = Attention(config, dtype, live)
        if live:
            self.mlp = GeGLU(config, dtype)
