# SPDX-License-Identifier: Apache-2.0
"""Observation to model tensors and actions back to robot units, exactly as the checkpoint was trained."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from rmuscle_core.errors import CheckpointError, ObservationError
from rmuscle_core.model.options import read_json
from rmuscle_core.observation import Observation
from rmuscle_core.processing import checkpoint_files as files
from rmuscle_core.processing.images import to_image
from rmuscle_core.processing.normalize import Normalizer
from rmuscle_core.processing.prompt import prompt_ids
from rmuscle_core.processing.tokenizer import ByteTokenizer, Tokenizer, find_tokenizer

if TYPE_CHECKING:
    from rmuscle_core.model import ModelConfig

logger = logging.getLogger('rmuscle')
# what to do about the two preprocessing rules that changed between LeRobot versions without a mark in the checkpoint:
# name -> (value of letterbox bars, whether the state in the prompt is padded with zeros to padded_dim)
COMPAT = {'lerobot05': (-1.0, False), 'lerobot04': (-3.0, True)}


@dataclass(frozen=True)
class ModelInputs:
    """One observation as CPU tensors; views in checkpoint order, absent views left out, prompt not padded."""

    images: torch.Tensor  # [V,3,S,S] float32 in [-1, 1]
    views: tuple[str, ...]
    token_ids: torch.Tensor  # [P] int64
    state: torch.Tensor  # [padded_dim] float32, normalised, zeros behind the robot's own dimensions
    state_normalized: np.ndarray  # [S] float32


@dataclass
class Processor:
    """All checkpoint-defined steps. Used by one thread at a time; `encode` and `decode` do not change it otherwise."""

    config: ModelConfig
    state: Normalizer
    actions: Normalizer
    tokenizer: Tokenizer
    relative: np.ndarray  # float32 [A]: 1 where an action is relative to the observed state, else 0
    compat: str = 'lerobot05'
    _warned: set[str] = field(default_factory=set, repr=False)

    @classmethod
    def from_checkpoint(cls, directory: str | Path, config: ModelConfig,
                        tokenizer_path: str | Path | None = None) -> Processor:
        """Read the processor files of a LeRobot checkpoint.

        Raises CheckpointError for missing statistics, unknown steps, a contradiction between the files, no tokenizer.
        """
        directory = Path(directory)
        raw = read_json(directory / 'config.json')
        before = files.read_steps(directory, files.PRE, config.kind)
        after = files.read_steps(directory, files.POST, config.kind)
        tokenizer = ByteTokenizer() if raw.get('rmuscle_tokenizer') == 'byte' else find_tokenizer(
            directory, tokenizer_path, **_tokenizer_name(before))
        if tokenizer.vocab > config.vocab:
            raise CheckpointError(f'tokenizer {tokenizer.name} has {tokenizer.vocab} ids, the checkpoint {directory} '
                                  f'embeds {config.vocab}; use the tokenizer it was trained with')
        compat = raw.get('rmuscle_compat', 'lerobot05')
        if compat not in COMPAT:
            raise CheckpointError(f'{directory / "config.json"}: rmuscle_compat must be one of {", ".join(COMPAT)}, '
                                  f'not {compat!r}')
        return cls(config, _normalizer(directory, before, files.NORMALIZER, 'STATE', config.state_dim),
                   _normalizer(directory, after, files.UNNORMALIZER, 'ACTION', config.action_dim),
                   tokenizer, _relative_mask(directory, before, after, config), compat)

    def encode(self, observation: Observation) -> ModelInputs:
        """Raises ObservationError naming the camera, the state dimension or the prompt that does not fit."""
        state = self._checked_state(observation)
        views = self._checked_views(observation)
        bar, padded_prompt = COMPAT[self.compat]
        size = self.config.vision.image_size
        normalized = self._normalized(state)
        padded = np.zeros(self.config.padded_dim, np.float32)
        padded[:len(normalized)] = normalized
        return ModelInputs(
            images=torch.stack([self._image(observation, view, size, bar) for view in views]), views=views,
            token_ids=self._prompt(observation.prompt, padded if padded_prompt else normalized),
            state=torch.from_numpy(padded), state_normalized=normalized)

    def decode(self, actions: torch.Tensor | np.ndarray, observation: Observation) -> np.ndarray:
        """Policy output [H,A_pad] to float32 [H,A] in robot units.

        Relative actions are anchored on the state of the observation the chunk was computed from, whole chunk at once;
        the state at execution time would add the motion made meanwhile a second time.
        """
        if isinstance(actions, torch.Tensor):
            actions = actions.detach().float().cpu().numpy()
        values = self.actions.unnormalize(actions[:, :self.config.action_dim])
        if self.relative.any():
            values = values + self._checked_state(observation)[:self.config.action_dim] * self.relative
        return values

    def report(self) -> dict[str, str]:
        """Every preprocessing choice, name -> plain text; equal reports preprocess equally."""
        bar, padded_prompt = COMPAT[self.compat]
        size = self.config.vision.image_size
        relative = ', '.join(str(i) for i in np.flatnonzero(self.relative)) or 'none'
        in_prompt = f'state of {self.config.padded_dim if padded_prompt else self.config.state_dim} bins'
        return {
            'images': f'RGB, resized with pad to {size}x{size}, bilinear, bars {bar:g}',
            'prompt': f'{self.config.kind}, {in_prompt if self.config.kind == "pi05" else "no state"}, '
                      f'at most {self.config.prompt_length} tokens',
            'tokenizer': self.tokenizer.name,
            'state normalization': f'{self.state.mode} {self.state.digest()}',
            'action normalization': f'{self.actions.mode} {self.actions.digest()}',
            'relative actions': relative,
        }

    def neutral_state(self) -> np.ndarray:
        """A raw state [S] in the middle of the training range, for warm-up without a robot."""
        return self.state.unnormalize(np.zeros(self.config.state_dim, np.float32))

    def doubts(self, state: np.ndarray | None = None) -> list[str]:
        """Sentences about what is allowed but probably wrong: dimensions that never moved, a state in other units.

        state: a first raw state [S]; a value beyond three training ranges from the middle is named.
        """
        found = [f'{what} dimension {i} hardly moves in the training statistics: small offsets become huge values'
                 for what, normalizer in (('state', self.state), ('action', self.actions))
                 for i in normalizer.narrow()]
        comparable = state is not None and self.state.mode != 'IDENTITY'
        far = [] if not comparable else np.flatnonzero(np.abs(self.state.normalize(state)) > 6)
        return found + [f'state dimension {i} is {state[i]:g}, far outside its training range: check its unit '
                        '(degrees or radians) and the joint order' for i in far if i not in self.state.narrow()]

    def _checked_state(self, observation: Observation) -> np.ndarray:
        try:
            with np.errstate(over='ignore'):  # what float32 cannot hold is infinite, and refused below
                state = np.asarray(observation.state, np.float32)
        except (TypeError, ValueError) as error:
            raise ObservationError(f'the state must be {self.config.state_dim} numbers ({error})') from error
        if state.shape != (self.config.state_dim,):
            raise ObservationError(f'the state must have {self.config.state_dim} values as in the checkpoint, found '
                                   f'shape {list(state.shape)}; check the joint names')
        broken = np.flatnonzero(~np.isfinite(state))
        if broken.size:
            raise ObservationError(f'state dimension {broken[0]} is {state[broken[0]]}, expected a finite number; '
                                   'check the publisher of that joint')
        return state

    def _normalized(self, state: np.ndarray) -> np.ndarray:
        with np.errstate(over='ignore'):
            normalized = self.state.normalize(state)
        broken = np.flatnonzero(~np.isfinite(normalized))
        if broken.size:
            raise ObservationError(f'state dimension {broken[0]} is {state[broken[0]]:g}, which no joint reaches; '
                                   'check the publisher of that joint')
        return normalized

    def _checked_views(self, observation: Observation) -> tuple[str, ...]:
        if not isinstance(observation.images, Mapping):
            raise ObservationError('the pictures must be a mapping of camera names, not '
                                   f'{type(observation.images).__name__}')
        unknown = sorted(set(observation.images) - set(self.config.cameras))
        if unknown:
            raise ObservationError(f'camera {unknown[0]!r} is not one the checkpoint has '
                                   f'({", ".join(self.config.cameras)}); map it to one of them or leave it out')
        views = tuple(name for name in self.config.cameras if name in observation.images)
        if not views:
            raise ObservationError(f'the observation has no picture; at least one of {", ".join(self.config.cameras)} '
                                   'is needed')
        return views

    def _image(self, observation: Observation, view: str, size: int, bar: float) -> torch.Tensor:
        try:
            return to_image(observation.images[view], size, bar)
        except ObservationError as error:
            raise ObservationError(f'camera {view!r}: {error}') from error

    def _prompt(self, task: str, state: np.ndarray) -> torch.Tensor:
        if not isinstance(task, str):
            raise ObservationError(f'the prompt must be text, not {type(task).__name__}; set the prompt of the task')
        limit = self.config.prompt_length
        ids, length = prompt_ids(self.config.kind, task, state, self.tokenizer, limit)
        if length > limit and task not in self._warned:
            self._warned = {task}
            logger.warning('the prompt has %d tokens, the checkpoint allows %d: its task text was cut, the state kept',
                           length, limit)
        return torch.tensor(ids, dtype=torch.int64)


def _tokenizer_name(steps: dict) -> dict[str, str]:
    name = (steps.get('tokenizer_processor', {}).get('config') or {}).get('tokenizer_name')
    return {'name': name} if name else {}


def _normalizer(directory: Path, steps: dict, step_name: str, feature: str, dims: int) -> Normalizer:
    if step_name not in steps:
        raise CheckpointError(f'{directory} has no {step_name} step, so the scale of {feature} is unknown; re-export '
                              'the checkpoint with its processors')
    step = steps[step_name]
    settings = step.get('config') or {}
    mode = (settings.get('norm_map') or {}).get(feature, 'IDENTITY')
    statistics, source = ({}, directory) if mode == 'IDENTITY' else files.read_statistics(directory, step)
    key = 'observation.state' if feature == 'STATE' else 'action'
    return Normalizer.from_statistics(mode, statistics, key, dims, settings.get('eps', 1e-8), str(source))


def _relative_mask(directory: Path, before: dict, after: dict, config: ModelConfig) -> np.ndarray:
    settings = before.get(files.RELATIVE, {}).get('config') or {}
    relative = bool(settings.get('enabled'))
    if relative != bool((after.get(files.ABSOLUTE, {}).get('config') or {}).get('enabled')):
        raise CheckpointError(f'{directory}: {files.RELATIVE} is {"on" if relative else "off"} but {files.ABSOLUTE} is '
                              'not the same; set both "enabled" alike, as the policy was trained')
    mask = np.full(config.action_dim, float(relative), np.float32)
    if relative and config.action_dim > config.state_dim:
        raise CheckpointError(f'{directory}: relative actions need a state value per action, found '
                              f'{config.state_dim} for {config.action_dim}; retrain with absolute actions')
    words = [str(word).lower() for word in settings.get('exclude_joints') or [] if word]
    for i, name in enumerate((settings.get('action_names') or [])[:config.action_dim]):
        if any(word in str(name).lower() for word in words):
            mask[i] = 0.0
    return mask
