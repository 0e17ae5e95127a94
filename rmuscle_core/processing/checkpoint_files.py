# SPDX-License-Identifier: Apache-2.0
"""LeRobot's processor files: ``policy_preprocessor.json``, ``policy_postprocessor.json`` and their statistics."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from rmuscle_core.errors import CheckpointError, reason
from rmuscle_core.model.options import check_types, read_json

PRE, POST = 'policy_preprocessor', 'policy_postprocessor'
NORMALIZER, UNNORMALIZER = 'normalizer_processor', 'unnormalizer_processor'
RELATIVE, ABSOLUTE = 'relative_actions_processor', 'absolute_actions_processor'
_TYPES = {'rename_map': dict, 'enabled': bool, 'exclude_joints': list, 'action_names': list, 'norm_map': dict,
          'eps': float, 'max_length': int, 'tokenizer_name': str, 'include_state_in_prompt': bool}
RELATIVE_KEYS = ('enabled', 'exclude_joints', 'action_names')
_OLD_NAMES = {'delta_actions_processor': RELATIVE}  # of LeRobot 0.5
_PROMPT = {'pi05': 'pi05_prepare_state_tokenizer_processor_step', 'pi0': 'pi0_new_line_processor'}
KNOWN = {'rename_observations_processor', 'to_batch_processor', 'device_processor', 'tokenizer_processor',
         NORMALIZER, UNNORMALIZER, RELATIVE, ABSOLUTE, *_PROMPT.values()}


def read_steps(directory: Path, pipeline: str, kind: str) -> dict[str, dict[str, Any]]:
    """Steps of one pipeline file, registry name -> step; a step that rMuscle does not perform is refused by name."""
    path = directory / f'{pipeline}.json'
    try:
        listed = read_json(path)['steps']
        steps = {_OLD_NAMES.get(step['registry_name'], step['registry_name']): step for step in listed}
        settings = {name: dict(step.get('config') or {}) for name, step in steps.items()}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f'{path} is not a LeRobot processor file: each of "steps" needs a "registry_name" and a '
                              'mapping as "config"; re-export the checkpoint with LeRobot 0.4 or later') from error
    for name, values in settings.items():
        check_types({key: value for key, value in values.items() if value is not None}, _TYPES, f'{path}, {name}',
                    others=True)
    foreign = set(steps) - KNOWN | set(steps) & {name for other, name in _PROMPT.items() if other != kind}
    if foreign:
        names = ', '.join(sorted(map(str, foreign)))
        raise CheckpointError(f'{path} has steps that rMuscle does not know for {kind}: {names}; export the checkpoint '
                              'without them')
    if not settings.get(_PROMPT['pi05'], {}).get('include_state_in_prompt', True):
        raise CheckpointError(f'{path} leaves the state out of the prompt (include_state_in_prompt: false), which is '
                              'not supported; use a checkpoint without proprioceptive memory')
    return steps


def read_statistics(directory: Path, step: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], Path]:
    """Statistics of a (un)normaliser step from the file it names in ``state_file``."""
    path = directory / str(step.get('state_file'))
    try:
        return load_file(path), path
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f'the normalisation statistics {path} cannot be read ({reason(error)}); copy the whole '
                              'checkpoint directory') from error


def write_processors(directory: str | Path, kind: str, features: Mapping[str, Mapping[str, Any]],
                     stats: Mapping[str, Mapping[str, np.ndarray]], norm_map: Mapping[str, str],
                     prompt_length: int, relative_exclude: list[str] | None = None,
                     action_names: list[str] | None = None) -> None:
    """Write both pipeline files and their statistics as LeRobot does.

    features: feature key -> {'type': 'VISUAL' | 'STATE' | 'ACTION', 'shape': [...]}, 'action' among them.
    stats: feature key -> statistic name -> array [dims], as `feature_statistics` makes them.
    norm_map: feature type -> mode, e.g. {'VISUAL': 'IDENTITY', 'STATE': 'QUANTILES', 'ACTION': 'QUANTILES'}.
    relative_exclude: None for absolute actions, else actions relative to the state but for joints with these words.
    """
    directory = Path(directory)
    relative = {'enabled': relative_exclude is not None, 'exclude_joints': relative_exclude or [],
                'action_names': action_names}
    normalizer = _step(NORMALIZER, eps=1e-8, features=dict(features), norm_map=dict(norm_map))
    tokenizer = _step('tokenizer_processor', max_length=prompt_length, task_key='task', padding_side='right',
                      padding='max_length', truncation=True, tokenizer_name='google/paligemma-3b-pt-224')
    device = _step('device_processor', device='cpu', float_dtype=None)
    start = [_step('rename_observations_processor', rename_map={}), _step('to_batch_processor')]
    tail = [_step(RELATIVE, **relative), normalizer]
    prompt = [_step(_PROMPT[kind]), tokenizer, device]
    before = [*start, *tail, *prompt] if kind == 'pi05' else [*start, *prompt, *tail]
    actions = {key: feature for key, feature in features.items() if feature['type'] == 'ACTION'}
    after = [_step(UNNORMALIZER, eps=1e-8, features=actions, norm_map=dict(norm_map)),
             _step(ABSOLUTE, enabled=relative['enabled']), device]
    tensors = {f'{key}.{name}': np.ascontiguousarray(value, np.float32)
               for key, named in stats.items() for name, value in named.items()}
    for pipeline, steps in ((PRE, before), (POST, after)):
        for index, step in enumerate(steps):
            if step['registry_name'] in (NORMALIZER, UNNORMALIZER):
                step['state_file'] = f'{pipeline}_step_{index}_{step["registry_name"]}.safetensors'
                save_file(tensors, directory / step['state_file'])
        text = json.dumps({'name': pipeline, 'steps': steps}, indent=2)
        (directory / f'{pipeline}.json').write_text(text + '\n')


def _step(name: str, **config: Any) -> dict[str, Any]:
    return {'registry_name': name, 'config': config}
