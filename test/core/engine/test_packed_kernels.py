# SPDX-License-Identifier: Apache-2.0
"""The packed forward with its Triton kernels, in the interpreter, against the same forward through their references."""

from __future__ import annotations

import pytest
import torch

from rmuscle_core.arena import ReferenceArena
from rmuscle_core.engine.packed import PackedVLA
from rmuscle_core.engine.plan import arena_shape
from rmuscle_core.engine.slot_ffn import SlotContextFFN, SlotNeuronFFN
from rmuscle_core.engine.spread import even
from rmuscle_core.ffn import DenseFFN
from rmuscle_core.model import VLA, ModelConfig, TransformerConfig, VisionConfig
from rmuscle_core.settings import Settings
from rmuscle_kernels import attention, geglu, layer, layer_norm, merge, neurons, norms, rope, runtime, select, step

KERNELS = (attention, geglu, layer, layer_norm, merge, neurons, norms, rope, select, step)
NEURONS, TOKENS = 128, 32
# the widths that the interpreter's tiles and the step kernel divide
CONFIG = ModelConfig('pi05', VisionConfig(16, 4, 64, 1, 64, 2), TransformerConfig(64, 2, 128, 2, 1, 32),
                     TransformerConfig(256, 2, NEURONS, 2, 1, 32), vocab=60, cameras=('l', 'r'), state_dim=3,
                     action_dim=3, chunk_size=5, steps=2, prompt_length=40, dtype='bfloat16', numerics='fast')


def random_arena(settings: Settings) -> ReferenceArena:
    arena = ReferenceArena(arena_shape(settings, CONFIG, TOKENS), settings.slots, torch.bfloat16, 'cpu')
    for part, scale in ((arena.x, 1.0), (arena.y, 0.1), (arena.residual, 0.1)):
        part.normal_(std=scale)
    arena.x *= torch.linspace(0.1, 3.2, TOKENS)[:, None]  # changes far apart, so that no rounding swaps two tokens
    ranked = [torch.randperm(NEURONS)[:arena.shape.masked] for _ in range(arena.neurons[..., 0].numel())]
    arena.neurons.copy_(torch.stack(ranked).view(arena.neurons.shape))
    arena.slot.fill_(1)
    return arena


@pytest.mark.skipif(not runtime.INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.parametrize(('neurons_evaluated', 'tokens', 'residual'), [
    (NEURONS, None, 'none'), (64, 12, 'reference'), (64, None, 'anchored')])
def test_kernels_compute_what_their_references_do(monkeypatch, neurons_evaluated, tokens, residual):
    torch.manual_seed(0)
    settings = Settings(slots=2, group_size=2 if residual == 'anchored' else 1)
    packed, arena = PackedVLA(VLA(CONFIG).eval()), random_arena(settings)
    images, noise = torch.rand(2, 3, 16, 16) * 2 - 1, torch.randn(1, 5, 32)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.inference_mode():
            prompt = packed.embed_prompt(torch.arange(1, 12))
            prefix = torch.cat([packed.embed_images(images).flatten(0, 1), prompt])[None]
            cache = packed.prefill(prefix, DenseFFN() if tokens is None else SlotContextFFN(arena, tokens))
            counts = even(neurons_evaluated, arena.shape.groups, 2)
            ffn = SlotNeuronFFN(arena, counts, NEURONS, settings.group_size, residual)
            return packed.denoise(cache, noise, ffn), cache.k.clone()

    expected = run()
    for module in KERNELS:
        monkeypatch.setattr(module, 'use_triton', lambda x, impl: impl != 'reference')
    for got, want in zip(run(), expected):
        assert not torch.equal(got, want), 'the kernels were not run'
        torch.testing.assert_close(got, want, atol=1.5e-2 * want.abs().max().item(), rtol=0)
