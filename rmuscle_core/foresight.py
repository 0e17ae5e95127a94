# SPDX-License-Identifier: Apache-2.0
"""Where the joints will be when the next call is due: the chunk that is being executed says so, if it means joints."""

from __future__ import annotations

import numpy as np

from rmuscle_core.model import ModelConfig
from rmuscle_core.processing import Processor

DECAY = 0.8  # weight of the past in the running errors, per call


class Foresight:
    """Predicts the next call's state as the last action executed before it, and watches whether that holds.

    Some checkpoints act in another space than they sense (end-effector poses, velocities). A prediction that is further
    off than "the robot stays where it is" has been is not offered; it is still made, and so can earn its trust.
    """

    def __init__(self, processor: Processor, config: ModelConfig) -> None:
        self._normalize = processor.normalize_state if config.action_dim == config.state_dim else None
        self._made: tuple[np.ndarray, np.ndarray] | None = None  # expected and present state of the last call
        self._errors = np.zeros(2)  # of expecting the action, of expecting no motion

    def observe(self, state: np.ndarray) -> None:
        """Compare a new call's normalised state [S] with what was expected of it."""
        if self._made is not None:
            self._errors = DECAY * self._errors + [float(np.abs(state - guess).mean()) for guess in self._made]
            self._made = None

    def expect(self, action: np.ndarray, state: np.ndarray) -> np.ndarray | None:
        """Normalised state [S] expected after ``action`` [A] in robot units; None where actions do not tell."""
        if self._normalize is None:
            return None
        expected = self._normalize(action)
        self._made = (expected, state)
        return expected if self._errors[0] <= self._errors[1] else None

    def forget(self) -> None:
        """A new episode: the robot is moved by others in between."""
        self._made = None
