# SPDX-License-Identifier: Apache-2.0
"""``rmuscle bench --layer``: one real-size FFN layer of each kind, cached against dense, with the policy's own FFNs."""

from __future__ import annotations

import math

import torch

from rmuscle_core.arena import ArenaShape, ReferenceArena
from rmuscle_core.bench.timing import Comparison, Work, interleave, synchronizer
from rmuscle_core.engine.spread import Counts, even
from rmuscle_core.ffn import ContextFFN, DenseFFN, NeuronFFN
from rmuscle_core.model import TransformerConfig
from rmuscle_core.model.gemma import GeGLU

PREFIX = TransformerConfig(width=2048, layers=1, mlp=16384)
EXPERT = TransformerConfig(width=1024, layers=1, mlp=4096)
TOKENS, CHUNK, GROUP = 768, 50, 5  # three views without text; one chunk; denoise steps that share a mask
RATIOS = (0.35, 0.5)


@torch.inference_mode()
def compare_prefix(rounds: int, device: torch.device, dtype: torch.dtype, sizes: TransformerConfig = PREFIX,
                   tokens: int = TOKENS, **timing) -> Comparison:
    """Context Cache on one prefix FFN. There are only visual rows, so the ratio is the share of rows computed.

    A third of the rows move against the reference and the others hardly, as between two executions of a task.
    """
    mlp = _layer(sizes, device, dtype)
    arena = _arena(sizes, device, dtype, tokens=tokens)
    reference = torch.randn(tokens, sizes.width, device=device, dtype=dtype)
    arena.x[0, 0], arena.y[0, 0] = reference, mlp(reference)
    moved = torch.where(torch.rand(tokens, 1, device=device) < 1 / 3, 0.5, 0.05)
    x = (reference + moved * torch.randn_like(reference)).to(dtype)[None]

    def call(ffn: DenseFFN | ContextFFN) -> Work:
        def work() -> None:
            ffn(x, mlp, 0, 0)
        return work

    works = {'dense': call(DenseFFN())}
    for ratio in RATIOS:
        works[f'{ratio:g}'] = call(ContextFFN(arena, math.ceil(ratio * tokens)))
    return interleave('dense', works, rounds, synchronize=synchronizer(device), **timing)


@torch.inference_mode()
def compare_expert(rounds: int, device: torch.device, dtype: torch.dtype, sizes: TransformerConfig = EXPERT,
                   chunk: int = CHUNK, **timing) -> Comparison:
    """Action Cache on one expert FFN, with the residual, over the GROUP steps that share a mask.

    As in a policy call the FFN object is new each time and only its buffers stay, so gathering the mask's weights is
    part of its cost.
    """
    mlp = _layer(sizes, device, dtype)
    arena = _arena(sizes, device, dtype, steps=GROUP, suffix=chunk)
    arena.neurons[0, 0, 0] = torch.randperm(sizes.mlp, device=device)
    x = torch.randn(1, chunk, sizes.width, device=device, dtype=dtype)

    def call(counts: Counts | None) -> Work:
        workspace = {}

        def work() -> None:
            ffn = DenseFFN() if counts is None else NeuronFFN(arena, counts, GROUP, 'reference', workspace)
            for step in range(GROUP):
                ffn(x, mlp, 0, step)
        return work

    works = {'dense': call(None)}
    for ratio in RATIOS:
        works[f'{ratio:g}'] = call(even(math.ceil(ratio * sizes.mlp), 1, 1))
    return interleave('dense', works, rounds, synchronize=synchronizer(device), **timing)


def _layer(sizes: TransformerConfig, device: torch.device, dtype: torch.dtype) -> GeGLU:
    torch.manual_seed(0)
    mlp = GeGLU(sizes, dtype).to(device).eval()
    for linear in (mlp.gate, mlp.up, mlp.down):
        torch.nn.init.normal_(linear.weight, std=linear.in_features ** -0.5)
    return mlp


def _arena(sizes: TransformerConfig, device: torch.device, dtype: torch.dtype, *, tokens: int = 0, steps: int = 0,
           suffix: int = 0) -> ReferenceArena:
    """One slot for one layer: of prefix states if there are tokens, of masks and residual if there are steps."""
    shape = ArenaShape(layers=1, tokens=tokens, width=sizes.width, compare_width=sizes.width, steps=steps, groups=1,
                       action_layers=1, masked=sizes.mlp, suffix=suffix, action_width=sizes.width, with_residual=True)
    return ReferenceArena(shape, 1, dtype, device)
