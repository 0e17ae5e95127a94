# SPDX-License-Identifier: Apache-2.0
"""How much each expert neuron contributes, for the masks of a reference."""

from __future__ import annotations

from collections.abc import Callable

import torch


class ScoreFFN:
    """Dense expert FFN that adds up contribution scores per mask group.

    Score of neuron j at one step and layer: ||down[:, j]||_2 * sum over rows |a[row, j]|, a the gated activation.
    scores: float32 [G, M, N].
    """

    def __init__(self, groups: int, layers: int, neurons: int, group_size: int, device: torch.device | str,
                 checkpoint: Callable[[], None]) -> None:
        self.scores = torch.zeros(groups, layers, neurons, device=device)
        self.group_size, self.checkpoint = group_size, checkpoint

    def __call__(self, x: torch.Tensor, mlp, layer: int, step: int = 0) -> torch.Tensor:
        self.checkpoint()
        a = mlp.activations(x)
        contribution = a[0].float().abs().sum(0) * mlp.down.weight.float().norm(dim=0)
        self.scores[step // self.group_size, layer] += contribution
        return mlp.down(a)

    def ranked(self, count: int) -> torch.Tensor:
        """The ``count`` highest scores' neurons, most important first: int32 [G, M, count]."""
        order = torch.sort(self.scores, dim=-1, descending=True, stable=True).indices
        return order[..., :count].to(torch.int32)
