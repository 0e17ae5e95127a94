# SPDX-License-Identifier: Apache-2.0
"""Sizes and semantics of one pi0 / pi0.5 model, as plain frozen data."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rmuscle_core.errors import CheckpointError
from rmuscle_core.settings import WEIGHT_DTYPES

DTYPES = {'float32': torch.float32, 'bfloat16': torch.bfloat16}
PROMPT_BUCKET = 64  # largest rounding of the prompt length a caller may use
NUMERICS = ('lerobot', 'fast')


@dataclass(frozen=True)
class VisionConfig:
    """A SigLIP tower; images are square, patches do not overlap."""

    image_size: int = 224
    patch: int = 14
    width: int = 1152
    layers: int = 27
    mlp: int = 4304
    heads: int = 16

    @property
    def tokens(self) -> int:
        """Visual tokens of one view."""
        return (self.image_size // self.patch) ** 2


@dataclass(frozen=True)
class TransformerConfig:
    """A Gemma stack; query heads share ``kv_heads`` key/value heads."""

    width: int
    layers: int
    mlp: int
    heads: int = 8
    kv_heads: int = 1
    head_dim: int = 256


@dataclass(frozen=True)
class ModelConfig:
    """Everything the network and its callers need to know about a checkpoint.

    cameras: names in checkpoint order; rotary positions depend on the order.
    dtype: compute dtype of the transformers, 'float32' or 'bfloat16'.
    numerics: 'lerobot' keeps the vision tower in float32 and rounds where LeRobot rounds; 'fast' has the tower in
        ``dtype`` too and rotates in float32. No difference when dtype is float32.
    rounded_rope: rotary frequencies went through bfloat16, as in every LeRobot model trained or run in bfloat16.
    weight_dtype: 'checkpoint' holds FFN weights in ``dtype``, 'fp8' as QuantizedGeGLU.
    steps, execute_steps: Euler steps of one call; actions of a chunk that are executed before the next call.
    """

    kind: str
    vision: VisionConfig
    prefix: TransformerConfig
    expert: TransformerConfig
    vocab: int
    cameras: tuple[str, ...]
    state_dim: int
    action_dim: int
    padded_dim: int = 32
    chunk_size: int = 50
    steps: int = 10
    prompt_length: int = 200
    dtype: str = 'float32'
    min_period: float = 4e-3
    max_period: float = 4.0
    execute_steps: int = 50
    numerics: str = 'lerobot'
    rounded_rope: bool = False
    weight_dtype: str = 'checkpoint'

    def __post_init__(self) -> None:
        for field, value, allowed in (('kind', self.kind, ('pi05', 'pi0')), ('dtype', self.dtype, tuple(DTYPES)),
                                      ('numerics', self.numerics, NUMERICS),
                                      ('weight_dtype', self.weight_dtype, WEIGHT_DTYPES)):
            if value not in allowed:
                raise CheckpointError(f'{field} must be one of {", ".join(allowed)}, not {value!r}')
        if self.vision.image_size % self.vision.patch or self.vision.width % self.vision.heads:
            raise CheckpointError(f'vision: image size {self.vision.image_size} must be a multiple of the patch '
                                  f'{self.vision.patch} and width {self.vision.width} of the {self.vision.heads} heads')
        pair = (self.prefix.layers, self.prefix.kv_heads, self.prefix.head_dim)
        if pair != (self.expert.layers, self.expert.kv_heads, self.expert.head_dim) or pair[2] % 2:
            raise CheckpointError('prefix and expert must agree in layers, kv_heads and an even head_dim, since the '
                                  f'expert attends to the prefix layer by layer; got {self.prefix} and {self.expert}')

    @property
    def suffix_rows(self) -> int:
        """Rows of one denoise step: the action chunk, and pi0's state token before it."""
        return self.chunk_size + (self.kind == 'pi0')

    @property
    def max_rows(self) -> int:
        """Longest sequence the rotary tables cover: every view, a full prompt rounded up to a bucket, the suffix."""
        return len(self.cameras) * self.vision.tokens + self.prompt_length + PROMPT_BUCKET + self.suffix_rows

    @property
    def compute_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def vision_dtype(self) -> torch.dtype:
        return self.compute_dtype if self.numerics == 'fast' else torch.float32

    @property
    def rope_dtype(self) -> torch.dtype:
        """LeRobot rotates in the activations' dtype."""
        return self.compute_dtype if self.numerics == 'lerobot' else torch.float32
