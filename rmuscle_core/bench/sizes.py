# SPDX-License-Identifier: Apache-2.0
"""Models whose latency is measured with random weights: latency does not depend on what the weights say."""

from __future__ import annotations

from dataclasses import replace

import torch

from rmuscle_core.model import VLA, ModelConfig, TransformerConfig, VisionConfig
from rmuscle_core.model.initialise import initialise

CAMERAS = ('top', 'left_wrist', 'right_wrist')
PI05 = ModelConfig('pi05', VisionConfig(), TransformerConfig(2048, 18, 16384), TransformerConfig(1024, 18, 4096),
                   vocab=257152, cameras=CAMERAS, state_dim=14, action_dim=14, dtype='bfloat16', numerics='fast',
                   rounded_rope=True)
SIZES = {
    'pi05': PI05,
    # Three eighths of pi0.5's widths, two thirds of its depth, a quarter of the tokens of a view; chunk, steps and
    # the ratios between widths as they are. A quarter of the tokens makes a CPU, which is bound by arithmetic in both
    # phases, spend its time as a GPU does on the full size: there denoising is bound by memory.
    'medium': replace(PI05, vision=VisionConfig(112, 14, 432, 18, 1614, 12), dtype='float32', vocab=1024,
                      prefix=TransformerConfig(768, 12, 6144, 6, 1, 128), numerics='lerobot', rounded_rope=False,
                      expert=TransformerConfig(384, 12, 1536, 6, 1, 128)),
    # As the policy of the simulated work cell.
    'small': ModelConfig('pi05', VisionConfig(64, 8, 128, 4, 512, 4), TransformerConfig(192, 6, 1536, 4, 1, 48),
                         TransformerConfig(128, 6, 512, 4, 1, 48), vocab=259, cameras=CAMERAS, state_dim=14,
                         action_dim=14, chunk_size=16, execute_steps=12, prompt_length=96),
    'tiny': ModelConfig('pi05', VisionConfig(16, 8, 16, 1, 16, 2), TransformerConfig(16, 3, 32, 2, 1, 8),
                        TransformerConfig(16, 3, 32, 2, 1, 8), vocab=40, cameras=CAMERAS[:2], state_dim=4,
                        action_dim=4, chunk_size=6, execute_steps=6, steps=4),
}
TEXT = {'pi05': 50, 'medium': 12, 'small': 52, 'tiny': 5}  # prompt tokens, about what the model's tokenizer makes


def sized(name: str, views: int | None = None, chunk: int | None = None, dtype: str | None = None,
          weight_dtype: str = 'checkpoint') -> ModelConfig:
    """The named configuration with other numbers of views or actions, or another way to hold weights."""
    config = SIZES[name]
    return replace(config, cameras=CAMERAS[:views] if views else config.cameras,
                   chunk_size=chunk or config.chunk_size, dtype=dtype or config.dtype, weight_dtype=weight_dtype)


def random_model(config: ModelConfig, device: torch.device) -> VLA:
    """Random weights, the same for every run, made in place: on the device and once, in the compute dtype."""
    torch.manual_seed(0)
    with torch.device('meta'):
        model = VLA(replace(config, weight_dtype='checkpoint'))
    model.to_empty(device=device)
    initialise(model)
    model.make_tables()
    if config.weight_dtype == 'fp8':
        from rmuscle_core.model.quantized import quantize_ffns
        quantize_ffns(model.requires_grad_(False))
    return model.eval()
