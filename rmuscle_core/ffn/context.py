# SPDX-License-Identifier: Apache-2.0
"""Context Cache: recompute the FFN for the visual tokens that changed most, reuse references' outputs elsewhere."""

from __future__ import annotations

import torch

from rmuscle_core.arena import ReferenceArena
from rmuscle_kernels.merge import merge_rows
from rmuscle_kernels.select import select_tokens


class ContextFFN:
    """Prefix FFN of one policy call. Text rows are always recomputed; selection is per layer and per call.

    Each token is compared with the references in ``arena.donors`` and may reuse the output of the nearest: the scene's
    parts resemble different executions, and looking at another one costs a comparison, not an FFN.

    recomputed: optional list that receives each layer's row index int32 [k + P], for reports.
    """

    def __init__(self, arena: ReferenceArena, tokens_recomputed: int, recomputed: list | None = None) -> None:
        self.arena, self.k, self.recomputed = arena, tokens_recomputed, recomputed

    def __call__(self, x: torch.Tensor, mlp, layer: int, step: int = 0) -> torch.Tensor:
        arena, rows = self.arena, x[0]
        tokens = arena.shape.tokens
        if self.k >= tokens:  # nothing to reuse: the dense code path, bit for bit
            return mlp(x)
        index, inverse = select_tokens(arena.comparable(rows[:tokens]), arena.x[:, layer], arena.donors, self.k,
                                       rows.shape[0] - tokens)
        if self.recomputed is not None:
            self.recomputed.append(index)
        return merge_rows(None, mlp(rows.index_select(0, index)), inverse, arena.y[:, layer])[None]
