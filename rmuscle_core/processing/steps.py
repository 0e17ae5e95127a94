# SPDX-License-Identifier: Apache-2.0
"""The reversible steps between the robot's numbers and the policy's, each one small and with its inverse."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from rmuscle_core.processing.normalize import Normalizer

BOUND = 10.0  # of a normalised state where training saw no motion; every value training saw there lies near [-1, 1]


class Step(Protocol):
    """State [S] and actions [H,A], float32; every ``state`` argument is the one that entered this step."""

    def forward(self, state: np.ndarray) -> np.ndarray:
        """The state as the next step, or the policy, takes it."""

    def to_robot(self, actions: np.ndarray, state: np.ndarray) -> np.ndarray:
        """Undo the step on the policy's actions."""

    def to_policy(self, actions: np.ndarray, state: np.ndarray) -> np.ndarray:
        """Do the step on the robot's actions: the inverse of `to_robot`."""

    def report(self) -> dict[str, str]:
        """What the step does, name -> plain text; equal reports do the same."""


@dataclass(frozen=True)
class AlohaSpace:
    """Standard ALOHA joints (two arms of 6 joints and a gripper) in the space in which pi0's base model was trained.

    Three joints turn the other way. A gripper's state is an opening in [0, 1] there, the linkage's angle here; its
    action is an angle in both, counted from elsewhere (openpi, aloha_policy.py, adapt_to_pi).
    """

    SIGNS = np.array([1, -1, -1, 1, 1, 1, 1] * 2, np.float32)
    GRIPPERS = np.array([6, 13])
    OPENING = (0.01844, 0.05800)  # metres, closed and open
    ARM, HORN = 0.036, 0.022  # metres, of the linkage
    ANGLE = (0.5476, 1.6296)  # radians that are 0 and 1 for the base model
    COMMAND = (-0.6213, 1.4910)  # radians that are 0 and 1 in ALOHA's actions

    def forward(self, state: np.ndarray) -> np.ndarray:
        turned = state * self.SIGNS
        low, high = self.OPENING
        opening = turned[self.GRIPPERS] * (high - low) + low
        with np.errstate(divide='ignore', invalid='ignore'):  # an opening of 0 metres lies far outside the range
            sine = (self.HORN ** 2 + opening ** 2 - self.ARM ** 2) / (2 * self.HORN * opening)
        angle = np.arcsin(np.clip(sine, -1, 1))
        turned[self.GRIPPERS] = (angle - self.ANGLE[0]) / (self.ANGLE[1] - self.ANGLE[0])
        return turned

    def to_robot(self, actions: np.ndarray, state: np.ndarray) -> np.ndarray:
        turned, (low, high) = actions * self.SIGNS, self.COMMAND
        turned[:, self.GRIPPERS] = (turned[:, self.GRIPPERS] + self.ANGLE[0] - low) / (high - low)
        return turned

    def to_policy(self, actions: np.ndarray, state: np.ndarray) -> np.ndarray:
        turned, (low, high) = actions * self.SIGNS, self.COMMAND
        turned[:, self.GRIPPERS] = turned[:, self.GRIPPERS] * (high - low) + low - self.ANGLE[0]
        return turned

    def report(self) -> dict[str, str]:
        return {'joint space': "standard ALOHA converted to the base model's (adapt_to_pi)"}


@dataclass(frozen=True)
class RelativeActions:
    """Actions that the policy gives relative to the state it saw. mask: float32 [A], 1 where relative, else 0.

    The whole chunk is anchored on that one state; the state at execution time would add the motion made meanwhile a
    second time.
    """

    mask: np.ndarray

    def forward(self, state: np.ndarray) -> np.ndarray:
        return state

    def to_robot(self, actions: np.ndarray, state: np.ndarray) -> np.ndarray:
        return actions + self._anchor(state)

    def to_policy(self, actions: np.ndarray, state: np.ndarray) -> np.ndarray:
        return actions - self._anchor(state)

    def report(self) -> dict[str, str]:
        return {'relative actions': ', '.join(str(i) for i in np.flatnonzero(self.mask)) or 'none'}

    def _anchor(self, state: np.ndarray) -> np.ndarray:
        anchor = np.zeros_like(self.mask)
        dims = min(len(state), len(anchor))
        anchor[:dims] = state[:dims] * self.mask[:dims]
        return anchor


@dataclass(frozen=True)
class Normalization:
    """Both scales of a checkpoint. Nothing is clipped, but a state dimension that never moved in training.

    There any offset is a huge number, of which pi0's state token and the prompt's bins would make nonsense; it is
    bounded to +-BOUND.
    """

    states: Normalizer
    actions: Normalizer

    @cached_property
    def _still(self) -> list[int]:
        return self.states.narrow()

    def forward(self, state: np.ndarray) -> np.ndarray:
        normalized = self.states.normalize(state)
        if self._still:
            normalized[self._still] = np.clip(normalized[self._still], -BOUND, BOUND)
        return normalized

    def to_robot(self, actions: np.ndarray, state: np.ndarray) -> np.ndarray:
        return self.actions.unnormalize(actions)

    def to_policy(self, actions: np.ndarray, state: np.ndarray) -> np.ndarray:
        return self.actions.normalize(actions)

    def report(self) -> dict[str, str]:
        return {'state normalization': f'{self.states.mode} {self.states.digest()}',
                'action normalization': f'{self.actions.mode} {self.actions.digest()}'}


@dataclass(frozen=True)
class Padding:
    """Zeros behind the robot's own dimensions, up to the policy's."""

    padded_dim: int
    action_dim: int

    def forward(self, state: np.ndarray) -> np.ndarray:
        padded = np.zeros(self.padded_dim, np.float32)
        padded[:len(state)] = state
        return padded

    def to_robot(self, actions: np.ndarray, state: np.ndarray) -> np.ndarray:
        return actions[:, :self.action_dim]

    def to_policy(self, actions: np.ndarray, state: np.ndarray) -> np.ndarray:
        padded = np.zeros((len(actions), self.padded_dim), np.float32)
        padded[:, :self.action_dim] = actions
        return padded

    def report(self) -> dict[str, str]:
        return {}
