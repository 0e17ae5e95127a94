# SPDX-License-Identifier: Apache-2.0
"""The expanded references: preallocated tensors, one slot per reference, read through a slot index.

Switching reference means writing one integer, so a captured CUDA graph serves every reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

SKETCH_SEED = 20251


@dataclass(frozen=True)
class ArenaShape:
    """Sizes of one expanded reference; letters as in docs/architecture.md.

    compare_width is D, or the width of the sketch that stands in for the FFN input when tokens are compared.
    masked is the number of ranked neurons kept; action_layers, steps, groups, suffix and action_width describe the
    denoiser, and a residual is held only if with_residual.
    """

    layers: int
    tokens: int
    width: int
    compare_width: int
    steps: int
    groups: int
    action_layers: int
    masked: int
    suffix: int
    action_width: int
    with_residual: bool

    def bytes_per_slot(self, element_size: int) -> dict[str, int]:
        """Bytes of one slot by part, for a given size of the floating-point element."""
        residual = self.steps * self.action_layers * self.suffix * self.action_width * self.with_residual
        return {'inputs': self.layers * self.tokens * self.compare_width * element_size,
                'outputs': self.layers * self.tokens * self.width * element_size,
                'neurons': self.groups * self.action_layers * self.masked * 4,
                'residual': residual * element_size}


class ReferenceArena:
    """Tensors of all slots; which slot holds what is the working set's business.

    x [slots, L, T, D or sketch], y [slots, L, T, D], neurons int32 [slots, G, M, masked],
    residual [slots, K, M, H, W] or None. What the current call reads: donors int32 [R], the slots whose prefix outputs
    its tokens may reuse, the best reference first; slot int32 [1], that first one.
    """

    def __init__(self, shape: ArenaShape, slots: int, dtype: torch.dtype, device: torch.device | str,
                 donors: int = 1) -> None:
        self.shape, self._make = shape, {'dtype': dtype, 'device': device}
        self.hold(slots)
        self.donors = torch.zeros(donors, dtype=torch.int32, device=device)
        self.slot = self.donors[:1]
        self.projection = (None if shape.compare_width == shape.width
                           else sketch_projection(shape.width, shape.compare_width).to(**self._make))

    def point_to(self, slot: int, others: Sequence[int] = ()) -> None:
        """Have the next call read this slot, and its tokens the others too, as far as there is room for them.

        A few bytes, written by the device itself, so that nobody waits for it.
        """
        chosen = [slot, *others][:len(self.donors)]
        self.donors.fill_(slot)  # the best one stands in for those that are missing
        for place, other in enumerate(chosen[1:], 1):
            self.donors[place].fill_(other)

    def sound(self, slot: int) -> bool:
        """Whether every number in a slot is finite; waits for the device."""
        parts = [part[slot] for part in (self.x, self.y, self.residual) if part is not None]
        return all(bool(torch.isfinite(part).all()) for part in parts)

    def hold(self, slots: int) -> None:
        """Have room for this many references, all empty; what was held is given up before anything is allocated."""
        shape, make = self.shape, self._make
        self.x = self.y = self.neurons = self.residual = None
        self.slots = slots
        self.x = torch.zeros(slots, shape.layers, shape.tokens, shape.compare_width, **make)
        self.y = torch.zeros(slots, shape.layers, shape.tokens, shape.width, **make)
        self.neurons = torch.zeros(slots, shape.groups, shape.action_layers, shape.masked,
                                   **{**make, 'dtype': torch.int32})
        if shape.with_residual:
            self.residual = torch.zeros(slots, shape.steps, shape.action_layers, shape.suffix, shape.action_width,
                                        **make)

    def comparable(self, x: torch.Tensor) -> torch.Tensor:
        """Return rows [R, D] as they are compared: themselves, or their sketch [R, S]."""
        return x if self.projection is None else x @ self.projection

    @property
    def nbytes(self) -> int:
        tensors = (self.x, self.y, self.neurons, self.residual)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def sketch_projection(width: int, sketch: int) -> torch.Tensor:
    """Fixed Gaussian projection float32 [width, sketch] that keeps squared distances in expectation.

    Source: Johnson and Lindenstrauss; the seed is fixed so that library, device and test agree.
    """
    generator = torch.Generator().manual_seed(SKETCH_SEED)
    return torch.randn(width, sketch, generator=generator) / sketch**0.5
