# SPDX-License-Identifier: Apache-2.0
"""The vision tower with its small operations folded: five products, an attention and two other launches a layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rmuscle_core.model.siglip import EPS, Vision, VisionLayer
from rmuscle_kernels.layer_norm import add_layer_norm


class PackedVision:
    """Inference of a Vision tower on its own weights, shared with it; one rounding where it has up to three."""

    def __init__(self, vision: Vision) -> None:
        self.vision = vision

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Views [V,3,S,S] in [-1,1] -> visual tokens [V,tokens,D]."""
        vision, views = self.vision, images.shape[0]
        x = vision.embed_patches(images).flatten(0, 1)
        layers = list(vision.layers)
        h = layers[0].norm1(x)
        for layer, after in zip(layers, [layer.norm1 for layer in layers[1:]] + [vision.norm]):
            y = F.linear(_attend(layer, h.unflatten(0, (views, -1))).flatten(0, 1), layer.out.weight)
            x, h = add_layer_norm(x, y, layer.out.bias, layer.norm2.weight, layer.norm2.bias, eps=EPS)
            y = F.linear(_gelu_linear(h, layer.fc1), layer.fc2.weight)
            x, h = add_layer_norm(x, y, layer.fc2.bias, after.weight, after.bias, eps=EPS)
        return vision.projector(h).unflatten(0, (views, -1))


def _attend(layer: VisionLayer, h: torch.Tensor) -> torch.Tensor:
    q, k, v = layer.qkv(h).unflatten(-1, (3, layer.heads, -1)).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def _gelu_linear(x: torch.Tensor, linear: torch.nn.Linear) -> torch.Tensor:
    """gelu_tanh(linear(x)); on a GPU inside the product, as cuBLASLt's epilogue (a CPU's would be the exact gelu)."""
    if x.is_cuda:
        return torch._addmm_activation(linear.bias, x, linear.weight.t(), use_gelu=True)
    return F.gelu(linear(x), approximate='tanh')
