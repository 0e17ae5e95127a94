# SPDX-License-Identifier: Apache-2.0
"""The recipe of a LeRobot checkpoint: what its two processor files say, by the rules of the version that wrote them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rmuscle_core.errors import CheckpointError
from rmuscle_core.model.config import ModelConfig
from rmuscle_core.model.formats import Source
from rmuscle_core.processing import checkpoint_files as files
from rmuscle_core.processing.normalize import Normalizer
from rmuscle_core.processing.prompt import PromptRule
from rmuscle_core.processing.recipe import PALIGEMMA, Recipe
from rmuscle_core.processing.steps import Normalization, Padding, RelativeActions
from rmuscle_core.processing.views import Views

# The two rules that changed between versions without a mark in the files: name -> (value of letterbox bars, whether
# the state in the prompt is padded with zeros).
COMPAT = {'lerobot05': (-1.0, False), 'lerobot04': (-3.0, True)}
IMAGES = 'observation.images.'


def read_recipe(source: Source, config: ModelConfig) -> Recipe:
    """Raises CheckpointError for missing statistics, unknown steps, or files that contradict each other."""
    directory, raw = source.directory, source.raw
    before = files.read_steps(directory, files.PRE, config.kind)
    after = files.read_steps(directory, files.POST, config.kind)
    compat = raw.get('rmuscle_compat', 'lerobot05')
    if compat not in COMPAT:
        raise CheckpointError(f'{source.described_by}: rmuscle_compat must be one of {", ".join(COMPAT)}, not '
                              f'{compat!r}')
    bar, padded = COMPAT[compat]
    tokenizing = before.get('tokenizer_processor', {}).get('config') or {}
    scale = Normalization(_normalizer(directory, before, files.NORMALIZER, 'STATE', config.state_dim),
                          _normalizer(directory, after, files.UNNORMALIZER, 'ACTION', config.action_dim))
    relative = RelativeActions(_relative_mask(source, before, after, config))
    return Recipe(
        Views(config.cameras, config.vision.image_size, bar, rename=_renamed(before, config, directory)),
        (relative, scale, Padding(config.padded_dim, config.action_dim)),
        PromptRule(config.kind, _limit(tokenizing, config, directory), config.padded_dim if padded else 0),
        origin=compat, tokenizer=raw.get('rmuscle_tokenizer', ''),
        tokenizer_name=tokenizing.get('tokenizer_name') or PALIGEMMA, doubts=_version_doubts(raw, before))


def _version_doubts(raw: dict[str, Any], before: dict[str, Any]) -> tuple[str, ...]:
    if 'rmuscle_compat' in raw or files.RELATIVE in before:
        return ()
    return ('the processor files look like those of LeRobot before 0.5, whose letterbox bars and state padding differ '
            'without a mark in the files; preprocessing follows 0.5, so if the policy was trained with 0.4 write '
            '"compat: lerobot04" into rmuscle.yaml beside it (and "compat: lerobot05" to confirm otherwise)',)


def _limit(tokenizing: dict[str, Any], config: ModelConfig, directory: Path) -> int:
    # the processor's number is the one LeRobot uses
    limit = tokenizing.get('max_length', config.prompt_length)
    if not 0 < limit <= config.prompt_length:
        raise CheckpointError(f'{directory / files.PRE}.json sets max_length to {limit}, but config.json says '
                              f'tokenizer_max_length {config.prompt_length}; set both as the policy was trained')
    return limit


def _renamed(before: dict[str, Any], config: ModelConfig, directory: Path) -> dict[str, str]:
    """Camera names of the data set -> the checkpoint's."""
    given = (before.get('rename_observations_processor', {}).get('config') or {}).get('rename_map') or {}
    names = {str(a).removeprefix(IMAGES): str(b).removeprefix(IMAGES) for a, b in given.items()
             if str(b).startswith(IMAGES)}
    for name, camera in names.items():
        # LeRobot's padding views are known to its configuration, but never seen.
        if camera not in config.cameras and not camera.startswith('empty_camera'):
            raise CheckpointError(f'{directory / files.PRE}.json renames {name} to {camera}, which is none of the '
                                  f'cameras in config.json ({", ".join(config.cameras)}); correct rename_map')
    return {name: camera for name, camera in names.items() if camera in config.cameras}


def _normalizer(directory: Path, steps: dict, step_name: str, feature: str, dims: int) -> Normalizer:
    if step_name not in steps:
        raise CheckpointError(f'{directory} has no {step_name} step, so the scale of {feature} is unknown; re-export '
                              'the checkpoint with its processors')
    step = steps[step_name]
    settings = step.get('config') or {}
    mode = str((settings.get('norm_map') or {}).get(feature, 'IDENTITY'))
    statistics, source = ({}, directory) if mode == 'IDENTITY' else files.read_statistics(directory, step)
    key = 'observation.state' if feature == 'STATE' else 'action'
    return Normalizer.from_statistics(mode, statistics, key, dims, settings.get('eps', 1e-8), str(source))


def _relative_mask(source: Source, before: dict, after: dict, config: ModelConfig) -> np.ndarray:
    directory, settings = source.directory, before.get(files.RELATIVE, {}).get('config') or {}
    relative = bool(settings.get('enabled'))
    if relative != bool((after.get(files.ABSOLUTE, {}).get('config') or {}).get('enabled')):
        raise CheckpointError(f'{directory}: {files.RELATIVE} is {"on" if relative else "off"} but {files.ABSOLUTE} is '
                              'not the same; set both "enabled" alike, as the policy was trained')
    if source.raw.get('use_relative_actions', relative) != relative:
        raise CheckpointError(f'{source.described_by} sets use_relative_actions to {not relative}, but '
                              f'{files.RELATIVE} is {"on" if relative else "off"}; set both alike, as the policy was '
                              'trained')
    foreign = [key for key, value in settings.items() if value and key not in files.RELATIVE_KEYS]
    if relative and foreign:
        raise CheckpointError(f'{directory}: {files.RELATIVE} sets {foreign[0]}, which is not supported; use a '
                              'checkpoint whose relative actions are plain differences')
    if relative and config.action_dim > config.state_dim:
        raise CheckpointError(f'{directory}: relative actions need a state value per action, found '
                              f'{config.state_dim} for {config.action_dim}; retrain with absolute actions')
    mask = np.full(config.action_dim, float(relative), np.float32)
    words = [str(word).lower() for word in settings.get('exclude_joints') or [] if word]
    for i, name in enumerate((settings.get('action_names') or [])[:config.action_dim]):
        if any(word in str(name).lower() for word in words):
            mask[i] = 0.0
    return mask
