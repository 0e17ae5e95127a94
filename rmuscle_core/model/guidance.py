# SPDX-License-Identifier: Apache-2.0
"""Real-time chunking: denoising that is drawn towards what the robot still executes of the running chunk.

Black, Galliker and Levine, "Real-Time Execution of Action Chunking Flow Policies" (2025). As in LeRobot, the gradient
of the predicted chunk is taken with the velocity held constant, and so is the identity: nothing is differentiated, and
any FFN, also one that evaluates a few neurons only, can be guided.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch


def prefix_weights(executed: int, end: int, steps: int, schedule: str) -> np.ndarray:
    """How firmly each step of a new chunk is held, float32 [steps]: 1 for those ``executed`` before it takes over, 0
    from ``end`` on, and between the two falling linearly ('linear') or faster ('exp').
    """
    executed = min(executed, end)
    ramp = np.linspace(1, 0, max(end - executed, 0) + 2)[1:-1]
    if schedule == 'exp':
        ramp = ramp * np.expm1(ramp) / (math.e - 1)
    return np.concatenate([np.ones(executed), ramp, np.zeros(steps)])[:steps].astype(np.float32)


def gain(step: int, steps: int, limit: float) -> float:
    """Strength of the pull at a denoise step; the flow runs from t = 1 to 0.

    Euler's step is 1 / steps, so that a gain of ``steps`` makes up the whole error in one; more would overshoot.
    """
    limit, t = min(limit, steps), 1 - step / steps
    if step == 0:  # pure noise: infinite by the formula
        return limit
    return min(t / (1 - t) * (t ** 2 + (1 - t) ** 2) / t ** 2, limit)


@dataclass(frozen=True)
class Guidance:
    """target, weights: float32 [H, A_pad], normalised actions of the running chunk and how firmly each is held.

    limit: the greatest gain. Both tensors may be static memory of a captured graph.
    """

    target: torch.Tensor
    weights: torch.Tensor
    limit: float

    @classmethod
    def towards(cls, leftover: np.ndarray, executed: int, shape: tuple[int, int], *, horizon: int, schedule: str,
                limit: float) -> Guidance:
        """Hold a chunk of ``shape`` [H, A_pad] to normalised actions [n, A] that are due when its first n rows are.

        executed: rows that will be executed before the chunk takes over. horizon: rows held, at most n; 0: all n. What
        pads the rows and columns holds nothing: a hold on zeros would draw the robot to the middle of its range.
        """
        rows, columns = leftover.shape
        rows = min(rows, shape[0])
        target, held = torch.zeros(shape), torch.zeros(shape)
        target[:rows, :columns] = torch.from_numpy(np.ascontiguousarray(leftover[:rows], dtype=np.float32))
        weights = prefix_weights(executed, min(horizon or rows, rows), shape[0], schedule)
        held[:, :columns] = torch.from_numpy(weights)[:, None]
        return cls(target, held, limit)

    def to(self, device: torch.device) -> Guidance:
        """The same on another device."""
        return Guidance(self.target.to(device), self.weights.to(device), self.limit)

    def __call__(self, velocity: torch.Tensor, x: torch.Tensor, step: int, steps: int) -> torch.Tensor:
        """The guided velocity at x, both float32 [..., H, A_pad]."""
        error = (self.target - (x - velocity * (1 - step / steps))) * self.weights
        return velocity - gain(step, steps, self.limit) * error
