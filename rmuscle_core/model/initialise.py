# SPDX-License-Identifier: Apache-2.0
"""Random weights from which a small model can be trained from scratch."""

from __future__ import annotations

import torch
from torch import nn


def initialise(model: nn.Module) -> None:
    """Fill every parameter of a VLA in place, from torch's global generator.

    Unit-variance streams everywhere: 1/sqrt(fan in), and less on the projections that add to a residual. LeRobot
    starts adaptive norms at zero, which closes every residual gate; here gates start open.
    """
    depth = {'vision': model.config.vision.layers, 'prefix': model.config.prefix.layers,
             'expert': model.config.expert.layers}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            std = module.in_features ** -0.5
            if name.endswith(('.out', '.down', '.fc2')):
                std *= (2 * depth[name.split('.')[0]]) ** -0.5
            nn.init.normal_(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=module.embedding_dim ** -0.5)
    nn.init.normal_(model.vision.positions, std=0.02)
    nn.init.zeros_(model.prefix.norms)
    if model.config.kind == 'pi0':
        nn.init.zeros_(model.expert.norms)
        return
    modulation = model.expert.modulation
    nn.init.normal_(modulation.weight, std=0.02 * modulation.in_features ** -0.5)
    with torch.no_grad():
        modulation.bias.view(model.expert.n_norms, 3, -1)[:, 2] = 1.0
