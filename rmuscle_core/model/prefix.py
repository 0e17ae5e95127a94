# SPDX-License-Identifier: Apache-2.0
"""The prefix model (images and prompt) and what it leaves for the action expert."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from rmuscle_core.model.config import ModelConfig
from rmuscle_core.model.gemma import GeGLU, Layer
from rmuscle_core.model.norms import add_rms_norm, rms_norm

FFN = Callable[[torch.Tensor, GeGLU, int, int], torch.Tensor]


@dataclass
class PrefixCache:
    """Keys and values of every prefix layer, rotated, and what a suffix needs to attend to them.

    k, v: per layer [B, kv_heads, length + room, head_dim]; the room takes one suffix's own keys in inference.
    hidden: [B, length, width], the residual stream entering the last layer.
    rope: cos and sin of the suffix positions. mask: which keys each folded suffix row sees, None for all.
    """

    k: list[torch.Tensor]
    v: list[torch.Tensor]
    length: int
    hidden: torch.Tensor
    rope: tuple[torch.Tensor, torch.Tensor]
    mask: torch.Tensor | None

    def extended(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the prefix followed by the suffix's own. Without autograd they share the cache's memory,
        so one cache serves one denoising at a time."""
        pairs = ((self.k[layer], k), (self.v[layer], v))
        if torch.is_grad_enabled() or self.k[layer].shape[2] != self.length + k.shape[2]:
            return tuple(torch.cat((kept[:, :, :self.length], own), 2) for kept, own in pairs)
        for kept, own in pairs:
            kept[:, :, self.length:] = own
        return self.k[layer], self.v[layer]

    def repeat(self, times: int) -> PrefixCache:
        """The same prefixes ``times`` over, [B] -> [times * B] (batch fastest): several suffixes per prefix."""
        def tiled(x: torch.Tensor | None) -> torch.Tensor | None:
            # Tables and masks have a batch axis only where padding differs between items.
            return x.repeat(times, *[1] * (x.dim() - 1)) if x is not None and x.dim() == 4 and x.shape[0] > 1 else x

        k, v = ([x.repeat(times, 1, 1, 1) for x in side] for side in (self.k, self.v))
        return replace(self, k=k, v=v, hidden=self.hidden.repeat(times, 1, 1), mask=tiled(self.mask),
                       rope=tuple(tiled(x) for x in self.rope))


class Prefix(nn.Module):
    """Gemma over visual tokens and prompt, attending both ways. Its last layer only makes keys and values."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        dtype, sizes = config.compute_dtype, config.prefix
        self.embedding = nn.Embedding(config.vocab, sizes.width, dtype=dtype)
        self.embedding_scale = float(torch.tensor(math.sqrt(sizes.width), dtype=dtype, device='cpu'))
        # Two norms per layer; of the last layer only the first is alive.
        self.norms = nn.Parameter(torch.empty(2 * sizes.layers - 1, sizes.width))
        self.layers = nn.ModuleList(Layer(sizes, dtype, live=i < sizes.layers - 1) for i in range(sizes.layers))

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [...] int64 -> [..., width], scaled by sqrt(width) rounded to the embedding's dtype."""
        return self.embedding(ids) * self.embedding_scale

    def forward(self, prefix: torch.Tensor, ffn: FFN, tables: tuple[torch.Tensor, torch.Tensor],
                n_valid: torch.Tensor | None) -> PrefixCache:
        length = prefix.shape[1]
        cos, sin = (table[:length] for table in tables)
        mask = None if n_valid is None else _visible(length, n_valid, prefix.device)
        room = 0 if torch.is_grad_enabled() else self.config.suffix_rows
        keys, values = [], []
        x = prefix.to(self.config.compute_dtype)
        h = rms_norm(x, self.norms[0])
        for i, layer in enumerate(self.layers):
            q, k, v = layer.attention.project(h, cos, sin)
            keys.append(_with_room(k, room))
            values.append(_with_room(v, room))
            if i == len(self.layers) - 1:
                break
            x, h = add_rms_norm(x, layer.attention.attend(q, k, v, mask), self.norms[2 * i + 1])
            x, h = add_rms_norm(x, ffn(h, layer.mlp, i, 0), self.norms[2 * i + 2])
        return PrefixCache(keys, values, length, x, _suffix_rope(self.config, length, tables, n_valid),
                           _suffix_mask(self.config, length, n_valid, prefix.device))


def _with_room(x: torch.Tensor, room: int) -> torch.Tensor:
    if room == 0:
        return x
    roomy = x.new_empty(*x.shape[:2], x.shape[2] + room, x.shape[3])
    roomy[:, :, :x.shape[2]] = x
    return roomy


def _visible(length: int, n_valid: torch.Tensor, device: torch.device) -> torch.Tensor:
    """bool [B,1,1,length]: rows before n_valid."""
    return torch.arange(length, device=device) < n_valid.reshape(-1, 1, 1, 1)


def _suffix_rope(config: ModelConfig, length: int, tables: tuple[torch.Tensor, torch.Tensor],
                 n_valid: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Suffix positions go on where the valid prefix ends: tables [suffix rows, head_dim / 2], or [B,1,...] padded."""
    rows = config.suffix_rows
    if n_valid is None:
        return tuple(table[length:length + rows] for table in tables)
    position = n_valid.reshape(-1, 1, 1) + torch.arange(rows, device=n_valid.device)
    return tuple(table[position] for table in tables)


def _suffix_mask(config: ModelConfig, length: int, n_valid: torch.Tensor | None,
                 device: torch.device) -> torch.Tensor | None:
    """Padding is hidden from every row; pi0's state token does not see the actions, which all see it."""
    rows = config.suffix_rows
    mask = None
    if n_valid is not None:
        own = torch.ones(n_valid.numel(), 1, 1, rows, dtype=torch.bool, device=device)
        mask = torch.cat((_visible(length, n_valid, device), own), -1)
    if config.kind == 'pi0':
        is_action = torch.arange(rows, device=device)[:, None] > 0
        block = is_action | (torch.arange(length + rows, device=device) <= length)
        block = block.repeat(config.expert.heads // config.expert.kv_heads, 1)[None, None]
        mask = block if mask is None else mask & block
    return mask
