# SPDX-License-Identifier: Apache-2.0
"""The FFN as the checkpoint defines it."""

from __future__ import annotations

import torch


class DenseFFN:
    """Every row, every neuron."""

    def __call__(self, x: torch.Tensor, mlp, layer: int, step: int = 0) -> torch.Tensor:
        return mlp(x)
