# SPDX-License-Identifier: Apache-2.0
"""pi0 / pi0.5 from pixels to velocities. The FFN is handed in; everything else is an ordinary dense policy."""

from __future__ import annotations

import torch
from torch import nn

from rmuscle_core.model.config import ModelConfig
from rmuscle_core.model.expert import Expert
from rmuscle_core.model.gemma import rope_tables
from rmuscle_core.model.guidance import Guidance
from rmuscle_core.model.initialise import initialise
from rmuscle_core.model.prefix import FFN, Prefix, PrefixCache
from rmuscle_core.model.siglip import Vision


class VLA(nn.Module):
    """A vision-language-action model. ``VLA(config)`` is randomly initialised for training; see also load_model.

    An FFN is any callable ``ffn(x, mlp, layer, step) -> y`` with x [B,rows,width] and ``mlp`` the layer's GeGLU.
    Nothing here waits for the device or branches on tensor values: a call can be captured in a CUDA graph once the
    modulations exist. It keeps no state between calls, so an FFN may raise to abandon one.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.vision = Vision(config.vision, config.prefix.width, config.vision_dtype)
        self.prefix = Prefix(config)
        self.expert = Expert(config)
        for name in ('cos', 'sin', 'step_modulations', 'step_embeddings'):
            self.register_buffer(name, None, persistent=False)
        if not self.expert.action_in.weight.is_meta:
            initialise(self)
            self.make_tables()
        if config.weight_dtype == 'fp8':
            # Here, since 8-bit weights bring in the kernels, which a training machine need not have.
            from rmuscle_core.model.quantized import quantize_ffns
            quantize_ffns(self)

    def make_tables(self) -> None:
        """(Re)compute the rotary tables, on the device of the weights."""
        self.cos, self.sin = rope_tables(self.config, self.expert.action_in.weight.device)

    @property
    def prefix_weight(self) -> torch.Tensor:
        """A tensor with the device and dtype of the prefix activations."""
        return self.prefix.embedding.weight

    def embed_images(self, images: torch.Tensor) -> torch.Tensor:
        """Views [V,3,S,S] in [-1,1] -> visual tokens [V,tokens,D], all views in one pass."""
        return self.vision(images).to(self.config.compute_dtype)

    def embed_prompt(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids [P] or [B,P] int64 -> [P,D] or [B,P,D]."""
        return self.prefix.embed(ids)

    def prefill(self, prefix: torch.Tensor, ffn: FFN, n_valid: torch.Tensor | None = None) -> PrefixCache:
        """prefix [B,T+P,D], visual rows first -> the cache that denoise and velocity read.

        n_valid: int tensor of one or B elements on the device when rows from there on are padding; None without.
        """
        return self.prefix(prefix, ffn, (self.cos, self.sin), n_valid)

    def denoise(self, cache: PrefixCache, noise: torch.Tensor, ffn: FFN, state: torch.Tensor | None = None,
                guidance: Guidance | None = None) -> torch.Tensor:
        """noise float32 [B,H,A_pad] -> normalised actions [B,H,A_pad], by Euler steps from t = 1 to 0."""
        x, steps = noise, self.config.steps
        for step in range(steps):
            velocity = self.velocity(cache, x, step, ffn, state)
            if guidance is not None:
                velocity = guidance(velocity, x, step, steps)
            x = x + velocity * (-1.0 / steps)
        return x

    def velocity(self, cache: PrefixCache, x: torch.Tensor, step: int, ffn: FFN, state: torch.Tensor | None = None,
                 time: torch.Tensor | None = None) -> torch.Tensor:
        """d x / d t at x [B,H,A_pad], float32, at denoise step ``step``.

        state: [B,S_pad] normalised and padded, for pi0 only. time: [B] float32 in (0, 1], computed with autograd
        instead of looked up; ``step`` is then only handed to the FFN.
        """
        if time is None:
            modulations, embedding = self.modulations()[step], self.step_embeddings[step]
        else:
            modulations, embedding = self.expert.condition(time)
            modulations, embedding = modulations.transpose(0, 1)[:, :, None], embedding[:, None]
        return self.expert(cache, self.expert.embed(x, embedding, state), modulations, ffn, step)

    def modulations(self) -> torch.Tensor:
        """float32 [K, 2 M + 1, 3 W]: scale, shift and gate of every expert norm at every denoise step.

        They depend on the time alone, so they are computed once and spare each step the reading of their weights.
        ``train()`` drops them; call it (then ``eval()``) after changing weights.
        """
        if self.step_modulations is None:
            steps = self.config.steps
            time = torch.tensor([1.0 - k / steps for k in range(steps)], device=self.cos.device)
            with torch.inference_mode(False), torch.no_grad(), torch.autocast(self.cos.device.type, enabled=False):
                modulations, self.step_embeddings = self.expert.condition(time)
            # Last: another thread takes this one's presence for both.
            self.step_modulations = modulations
        return self.step_modulations

    def train(self, mode: bool = True) -> VLA:
        if mode:
            self.step_modulations = self.step_embeddings = None
        return super().train(mode)
