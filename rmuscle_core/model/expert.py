# SPDX-License-Identifier: Apache-2.0
"""The action expert: turns noise into an action chunk, conditioned on the prefix and on the time of the flow."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from rmuscle_core.model.config import ModelConfig
from rmuscle_core.model.gemma import Layer
from rmuscle_core.model.norms import ada_rms_norm, gated_add_ada_rms_norm
from rmuscle_core.model.prefix import FFN, PrefixCache


def embed_time(time: torch.Tensor, width: int, min_period: float, max_period: float) -> torch.Tensor:
    """time [B] -> float32 [B,width], sines then cosines over log-spaced periods; float64 inside, as in LeRobot."""
    fraction = torch.linspace(0.0, 1.0, width // 2, dtype=torch.float64, device=time.device)
    frequency = 2 * math.pi / (min_period * (max_period / min_period) ** fraction)
    angle = time.double()[:, None] * frequency
    return torch.cat((angle.sin(), angle.cos()), -1).float()


class Expert(nn.Module):
    """Gemma over the suffix. Each of its 2 M + 1 norms has a modulation (scale, shift, gate), one row of 3 W.

    pi0.5 makes modulations from the time; pi0's norm weights are the constant modulation (weight, 0, 1).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        sizes, width = config.expert, config.expert.width
        self.n_norms = 2 * sizes.layers + 1
        self.layers = nn.ModuleList(Layer(sizes, config.compute_dtype) for _ in range(sizes.layers))
        self.action_in = nn.Linear(config.padded_dim, width)
        self.action_out = nn.Linear(width, config.padded_dim)
        if config.kind == 'pi05':
            self.time_in, self.time_out = nn.Linear(width, width), nn.Linear(width, width)
            self.modulation = nn.Linear(width, self.n_norms * 3 * width)
        else:
            self.state_in = nn.Linear(config.padded_dim, width)
            self.time_in, self.time_out = nn.Linear(2 * width, width), nn.Linear(width, width)
            self.norms = nn.Parameter(torch.empty(self.n_norms, width))

    def condition(self, time: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """time [B] -> modulations [B, 2 M + 1, 3 W] and time embedding [B, W], both float32."""
        config, width = self.config, self.config.expert.width
        embedding = embed_time(time, width, config.min_period, config.max_period)
        if config.kind == 'pi05':
            condition = F.silu(self.time_out(F.silu(self.time_in(embedding))))
            return self.modulation(condition).unflatten(-1, (self.n_norms, 3 * width)), embedding
        constant = torch.cat((self.norms, torch.zeros_like(self.norms), torch.ones_like(self.norms)), -1)
        return constant.expand(len(time), -1, -1), embedding

    def embed(self, x: torch.Tensor, embedding: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
        """Noisy actions x [B,H,A_pad] (pi0: and state [B,S_pad]) -> suffix [B, suffix rows, W], float32."""
        actions = self.action_in(x)
        if self.config.kind == 'pi05':
            return actions
        joined = torch.cat((actions, embedding.expand_as(actions)), -1)
        actions = self.time_out(F.silu(self.time_in(joined)))
        return torch.cat((self.state_in(state)[:, None], actions), 1)

    def forward(self, cache: PrefixCache, suffix: torch.Tensor, modulations: torch.Tensor, ffn: FFN,
                step: int) -> torch.Tensor:
        """suffix [B,rows,W]; modulations [2 M + 1, 3 W] or [2 M + 1, B, 1, 3 W] -> velocity float32 [B,H,A_pad]."""
        x = suffix.to(self.config.compute_dtype)
        scale, shift, gate = modulations[0].chunk(3, -1)
        h = ada_rms_norm(x, scale, shift)
        for i, layer in enumerate(self.layers):
            q, k, v = layer.attention.project(h, *cache.rope)
            y = layer.attention.attend(q, *cache.extended(i, k, v), cache.mask)
            x, h, gate = _join(x, y, gate, modulations[2 * i + 1])
            x, h, gate = _join(x, ffn(h, layer.mlp, i, step), gate, modulations[2 * i + 2])
        return self.action_out(h[:, -self.config.chunk_size:].float())


def _join(x: torch.Tensor, delta: torch.Tensor, gate: torch.Tensor,
          modulation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Add a sublayer's output through the gate its own norm made; normalise for the next one and return its gate."""
    scale, shift, next_gate = modulation.chunk(3, -1)
    x, h = gated_add_ada_rms_norm(x, delta, gate, scale, shift)
    return x, h, next_gate
