# SPDX-License-Identifier: Apache-2.0
"""The SigLIP vision tower and its projection to the prefix width."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from rmuscle_core.model.config import VisionConfig

EPS = 1e-6


class VisionLayer(nn.Module):
    """Pre-norm transformer layer with biases and a plain GELU MLP."""

    def __init__(self, config: VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm1 = nn.LayerNorm(config.width, eps=EPS, dtype=dtype)
        self.qkv = nn.Linear(config.width, 3 * config.width, dtype=dtype)
        self.out = nn.Linear(config.width, config.width, dtype=dtype)
        self.norm2 = nn.LayerNorm(config.width, eps=EPS, dtype=dtype)
        self.fc1 = nn.Linear(config.width, config.mlp, dtype=dtype)
        self.fc2 = nn.Linear(config.mlp, config.width, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x)), approximate='tanh'))


class Vision(nn.Module):
    """images [V,3,S,S] in [-1,1] -> visual tokens [V,tokens,prefix width]; V counts views, or frames times views."""

    def __init__(self, config: VisionConfig, prefix_width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.patch = config.patch
        self.patches = nn.Linear(3 * config.patch ** 2, config.width, dtype=dtype)
        self.positions = nn.Parameter(torch.empty(config.tokens, config.width, dtype=dtype))
        self.layers = nn.ModuleList(VisionLayer(config, dtype) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, eps=EPS, dtype=dtype)
        self.projector = nn.Linear(config.width, prefix_width, dtype=dtype)

    def embed_patches(self, images: torch.Tensor) -> torch.Tensor:
        """images [V,3,S,S] -> what enters the first layer, [V,tokens,width]."""
        # A matrix product over cut-out patches: cuDNN would compute the convolution in TF32 even for float32.
        patches = images.unflatten(-1, (-1, self.patch)).unflatten(-3, (-1, self.patch)).permute(0, 2, 4, 1, 3, 5)
        return self.patches(patches.flatten(3).flatten(1, 2).to(self.positions.dtype)) + self.positions

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.embed_patches(images)
        for layer in self.layers:
            x = layer(x)
        return self.projector(self.norm(x))
