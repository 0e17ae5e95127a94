# SPDX-License-Identifier: Apache-2.0
"""The recipe of an openpi checkpoint: its norm_stats.json, and the profile for what only openpi's code says."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from rmuscle_core.errors import CheckpointError
from rmuscle_core.model.config import ModelConfig
from rmuscle_core.model.formats import Source
from rmuscle_core.model.options import OPTIONS, read_json
from rmuscle_core.model.profile import Profile
from rmuscle_core.processing.normalize import Normalizer
from rmuscle_core.processing.prompt import PromptRule
from rmuscle_core.processing.recipe import Recipe
from rmuscle_core.processing.steps import AlohaSpace, Normalization, Padding, RelativeActions
from rmuscle_core.processing.views import Views

EPS = 1e-6
MODES = {'pi05': 'QUANTILES', 'pi0': 'MEAN_STD'}


def read_recipe(source: Source, config: ModelConfig) -> Recipe:
    """Raises CheckpointError for missing or unusable statistics."""
    if find_spec('PIL') is None:  # now, not at the first picture
        raise CheckpointError(f'{source.directory} is an openpi checkpoint, whose pictures are resized by Pillow, '
                              'which is not installed; install it with: pip install Pillow')
    profile = source.profile
    path = _statistics_file(source.directory, profile)
    named = read_json(path).get('norm_stats')
    scales = [_normalizer(named, key, dims, MODES[config.kind], path)
              for key, dims in (('state', config.state_dim), ('actions', config.action_dim))]
    steps = [AlohaSpace()] if profile.adapt_to_pi else []
    steps += [RelativeActions(_mask(profile)), Normalization(*scales), Padding(config.padded_dim, config.action_dim)]
    with_state = config.kind == 'pi05' and profile.state_in_prompt
    return Recipe(Views(config.cameras, config.vision.image_size, antialiased=True, rename=profile.cameras),
                  tuple(steps), PromptRule('pi05' if with_state else 'openpi', config.prompt_length), origin='openpi',
                  tokenizer=profile.tokenizer)


def _statistics_file(directory: Path, profile: Profile) -> Path:
    if profile.asset_id:
        return directory / 'assets' / profile.asset_id / 'norm_stats.json'
    found = sorted((directory / 'assets').rglob('norm_stats.json'))
    if len(found) == 1:
        return found[0]
    if not found:
        raise CheckpointError(f'{directory} has no assets/<asset id>/norm_stats.json, so the scale of state and '
                              'actions is unknown; copy the assets folder of the training')
    ids = ', '.join(str(path.parent.relative_to(directory / 'assets')) for path in found)
    raise CheckpointError(f'{directory / "assets"} has statistics of several robots ({ids}); choose one with asset_id '
                          f'in {directory / OPTIONS}')


def _normalizer(named: Any, key: str, dims: int, mode: str, path: Path) -> Normalizer:
    found = named.get(key) if isinstance(named, dict) else None
    if not isinstance(found, dict):
        raise CheckpointError(f'{path} has no statistics of {key!r} under "norm_stats"; compute them with openpi '
                              '(scripts/compute_norm_stats.py)')
    try:
        # openpi computes them over padded vectors; the robot's own dimensions come first
        statistics = {f'{key}.{name}': np.asarray(values, np.float32)[:dims] for name, values in found.items()
                      if values is not None}
    except (TypeError, ValueError, IndexError) as error:
        raise CheckpointError(f'{path}: the statistics of {key!r} must be lists of numbers ({error}); compute them '
                              'again with openpi') from error
    return Normalizer.from_statistics(mode, statistics, key, dims, EPS, str(path), origin='openpi')


def _mask(profile: Profile) -> np.ndarray:
    mask, start = np.zeros(profile.action_dim, np.float32), 0
    for run in profile.relative:
        mask[start:start + abs(run)] = run > 0
        start += abs(run)
    return mask
