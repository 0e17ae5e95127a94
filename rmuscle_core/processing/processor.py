# SPDX-License-Identifier: Apache-2.0
"""Observation to model tensors and actions back to robot units, exactly as the checkpoint was trained."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from rmuscle_core.errors import ObservationError
from rmuscle_core.model.formats import open_source
from rmuscle_core.observation import Observation
from rmuscle_core.processing import lerobot, openpi
from rmuscle_core.processing.normalize import Normalizer
from rmuscle_core.processing.recipe import Recipe
from rmuscle_core.processing.tokenizer import ByteTokenizer, Tokenizer, check_vocabulary, find_tokenizer

if TYPE_CHECKING:
    from rmuscle_core.model import ModelConfig
    from rmuscle_core.model.guidance import Guidance

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelInputs:
    """One observation as CPU tensors; views in checkpoint order, absent views left out, prompt not padded."""

    images: torch.Tensor  # [V,3,S,S] float32 in [-1, 1]
    views: tuple[str, ...]
    token_ids: torch.Tensor  # [P] int64
    state: torch.Tensor  # [padded_dim] float32, normalised, zeros behind the robot's own dimensions
    state_normalized: np.ndarray  # [S] float32
    guidance: Guidance | None = None  # what holds the chunk to the running one (real-time chunking)


def read_recipe(directory: str | Path, config: ModelConfig) -> Recipe:
    """Preprocessing of a checkpoint but for its tokenizer; raises CheckpointError for what is missing or unknown."""
    source = open_source(directory)
    return (openpi if source.profile else lerobot).read_recipe(source, config)


@dataclass
class Processor:
    """All checkpoint-defined steps. Used by one thread at a time; `encode` and `decode` do not change it otherwise."""

    config: ModelConfig
    recipe: Recipe
    tokenizer: Tokenizer
    _warned: set[str] = field(default_factory=set, repr=False)

    @classmethod
    def from_checkpoint(cls, directory: str | Path, config: ModelConfig,
                        tokenizer_path: str | Path | None = None) -> Processor:
        """Read the preprocessing of a LeRobot or openpi checkpoint.

        Raises CheckpointError for missing statistics, unknown steps, a contradiction between the files, no tokenizer.
        """
        directory = Path(directory)
        recipe = read_recipe(directory, config)
        named = recipe.tokenizer and directory / recipe.tokenizer
        tokenizer = ByteTokenizer() if recipe.tokenizer == 'byte' else find_tokenizer(
            directory, tokenizer_path or named, recipe.tokenizer_name)
        check_vocabulary(tokenizer, config.vocab, directory)
        return cls(config, recipe, tokenizer)

    @property
    def state(self) -> Normalizer:
        """The scale of the state."""
        return self.recipe.normalization.states

    @property
    def actions(self) -> Normalizer:
        """The scale of the actions."""
        return self.recipe.normalization.actions

    def encode(self, observation: Observation) -> ModelInputs:
        """Raises ObservationError naming the camera, the state dimension or the prompt that does not fit."""
        normalized, padded = self._normalized(self._checked_state(observation))
        images, views = self.recipe.views.encode(observation.images)
        return ModelInputs(images, views, self._prompt(observation.prompt, normalized), torch.from_numpy(padded),
                           normalized)

    def decode(self, actions: torch.Tensor | np.ndarray, observation: Observation) -> np.ndarray:
        """Policy output [H,A_pad] to float32 [H,A] in robot units; observation: that which the chunk was made from."""
        if isinstance(actions, torch.Tensor):
            actions = actions.detach().float().cpu().numpy()
        return self.recipe.to_robot(actions, self._checked_state(observation))

    def encode_actions(self, actions: np.ndarray, observation: Observation) -> np.ndarray:
        """The inverse of `decode`: robot units [n,A] to [n,A] as the policy would give them for ``observation``."""
        padded = self.recipe.to_policy(np.asarray(actions, np.float32), self._checked_state(observation))
        return padded[:, :self.config.action_dim]

    def normalize_state(self, state: np.ndarray) -> np.ndarray:
        """A raw state [S] as `ModelInputs.state_normalized` holds it."""
        return self.recipe.forward(np.asarray(state, np.float32))[0]

    def report(self) -> dict[str, str]:
        """Every preprocessing choice, name -> plain text; equal reports preprocess equally."""
        return {**self.recipe.report(), 'tokenizer': self.tokenizer.name}

    def announce(self) -> None:
        """Log every choice once, and what the checkpoint's files leave open."""
        for name, choice in self.report().items():
            logger.info('preprocessing, %s: %s', name, choice)
        for doubt in self.recipe.doubts:
            logger.warning(doubt)

    def neutral_state(self) -> np.ndarray:
        """A raw state [S] in the middle of the training range, for warm-up without a robot."""
        return self.state.unnormalize(np.zeros(self.config.state_dim, np.float32))

    def doubts(self, state: np.ndarray | None = None) -> dict[str, str]:
        """What is allowed but probably wrong, a sentence each: dimensions that never moved, a state in other units.

        The keys are the same whatever the values, to tell a doubt once.

        state: a first raw state [S]; a value beyond three training ranges from the middle is named.
        """
        still = self.state.narrow()
        found = {f'{what} {i} still': f'{what} dimension {i} hardly moves in the training statistics: small offsets '
                 'become huge values'
                 for what, normalizer in (('state', self.state), ('action', self.actions))
                 for i in normalizer.narrow()}
        comparable = state is not None and self.state.mode != 'IDENTITY'
        far = np.flatnonzero(np.abs(self.normalize_state(state)) > 6) if comparable else []
        return found | {f'state {i} far': f'state dimension {i} is {state[i]:g}, far outside its training range: check '
                        'its unit (degrees or radians) and the joint order' for i in far if i not in still}

    def _checked_state(self, observation: Observation) -> np.ndarray:
        try:
            with np.errstate(over='ignore'):  # what float32 cannot hold is infinite, and refused below
                state = np.array(observation.state, np.float32)  # a copy: the history outlives the caller's array
        except (TypeError, ValueError, OverflowError) as error:
            raise ObservationError(f'the state must be {self.config.state_dim} numbers ({error})') from error
        if state.shape != (self.config.state_dim,):
            raise ObservationError(f'the state must have {self.config.state_dim} values as in the checkpoint, found '
                                   f'shape {list(state.shape)}; check the joint names')
        broken = np.flatnonzero(~np.isfinite(state))
        if broken.size:
            raise ObservationError(f'state dimension {broken[0]} is {state[broken[0]]}, expected a finite number; '
                                   'check the publisher of that joint')
        return state

    def _normalized(self, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        with np.errstate(over='ignore'):
            normalized, padded = self.recipe.forward(state)
        broken = np.flatnonzero(~np.isfinite(normalized))
        if broken.size:
            raise ObservationError(f'state dimension {broken[0]} is {state[broken[0]]:g}, which no joint reaches; '
                                   'check the publisher of that joint')
        return normalized, padded

    def _prompt(self, task: str, state: np.ndarray) -> torch.Tensor:
        if not isinstance(task, str):
            raise ObservationError(f'the prompt must be text, not {type(task).__name__}; set the prompt of the task')
        ids, length = self.recipe.prompt.ids(task, state, self.tokenizer)
        if max(ids) >= self.config.vocab:
            raise ObservationError(f'the prompt has a token that the checkpoint does not embed ({max(ids)} of '
                                   f'{self.config.vocab}), such as "<image>"; take it out of the task text')
        if length > self.recipe.prompt.limit and task not in self._warned:
            self._warned = {task}
            logger.warning('the prompt has %d tokens, the checkpoint allows %d: its task text was cut, the state kept',
                           length, self.recipe.prompt.limit)
        return torch.tensor(ids, dtype=torch.int64)
