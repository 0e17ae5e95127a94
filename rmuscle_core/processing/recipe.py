# SPDX-License-Identifier: Apache-2.0
"""Everything a checkpoint says about preprocessing, apart from the tokenizer itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rmuscle_core.processing.prompt import PromptRule
from rmuscle_core.processing.steps import Normalization, Padding, Step
from rmuscle_core.processing.views import Views

PALIGEMMA = 'google/paligemma-3b-pt-224'


@dataclass(frozen=True)
class Recipe:
    """steps: the state passes them in this order, actions in reverse; the last one pads.

    origin: which training code's rules these are. tokenizer: 'byte', a file or folder, or empty to search for the one
    named tokenizer_name. doubts: sentences about what the files leave open.
    """

    views: Views
    steps: tuple[Step, ...]
    prompt: PromptRule
    origin: str
    tokenizer: str = ''
    tokenizer_name: str = PALIGEMMA
    doubts: tuple[str, ...] = ()

    @property
    def normalization(self) -> Normalization:
        return next(step for step in self.steps if isinstance(step, Normalization))

    @property
    def padding(self) -> Padding:
        return next(step for step in self.steps if isinstance(step, Padding))

    def forward(self, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Raw state [S] -> the normalised state [S] and the same padded."""
        *before, last = self.steps
        for step in before:
            state = step.forward(state)
        return state, last.forward(state)

    def to_robot(self, actions: np.ndarray, state: np.ndarray) -> np.ndarray:
        """Policy output [H,A_pad] -> [H,A] in robot units; state: the raw one the actions were computed from."""
        for step, entered in reversed(list(zip(self.steps, self._entering(state)))):
            actions = step.to_robot(actions, entered)
        return actions

    def to_policy(self, actions: np.ndarray, state: np.ndarray) -> np.ndarray:
        """The inverse of `to_robot`: robot units [H,A] -> [H,A_pad], anchored on the raw ``state``."""
        for step, entered in zip(self.steps, self._entering(state)):
            actions = step.to_policy(actions, entered)
        return actions

    def report(self) -> dict[str, str]:
        """Every choice, name -> plain text; equal reports preprocess equally."""
        state_dim = len(self.normalization.states.first)
        lines = {'rules': self.origin, **self.views.report(), **self.prompt.report(state_dim),
                 'joint space': "the robot's own", 'relative actions': 'none'}
        for step in self.steps:
            lines |= step.report()
        return lines

    def _entering(self, state: np.ndarray) -> list[np.ndarray]:
        states = [state]
        for step in self.steps[:-1]:
            states.append(step.forward(states[-1]))
        return states
