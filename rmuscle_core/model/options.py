# SPDX-License-Identifier: Apache-2.0
"""Small files beside the weights: JSON that training wrote, and ``rmuscle.yaml``, where a user adds what it left out.

For a LeRobot checkpoint ``rmuscle.yaml`` may hold ``compat`` (lerobot05, lerobot04), ``tokenizer`` (a file or folder,
or "byte"), ``rounded_rope`` (true, false), ``vision_heads`` and ``dtype`` (float32, bfloat16: to compute in another
type than the policy was trained in). The first four act like config.json keys that begin with "rmuscle_".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rmuscle_core.errors import CheckpointError, reason

OPTIONS = 'rmuscle.yaml'
LEROBOT_OPTIONS = {'compat': str, 'tokenizer': str, 'rounded_rope': bool, 'vision_heads': int, 'dtype': str}
TYPE_NAMES = {str: 'text', bool: 'true or false', int: 'a whole number', float: 'a number', dict: 'a mapping',
              list: 'a list'}


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of a checkpoint; raises CheckpointError naming the file."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f'cannot read {path} ({reason(error)}); point to a complete LeRobot checkpoint directory '
                              '(usually .../pretrained_model)') from error
    if not isinstance(content, dict):
        raise CheckpointError(f'{path} must hold a JSON object, not a {type(content).__name__}; re-export the '
                              'checkpoint')
    return content


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a mapping of text keys from YAML; raises CheckpointError naming the file."""
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise CheckpointError(f'cannot read {path} ({reason(error)}); see docs/checkpoints.md for its keys') from error
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise CheckpointError(f'{path} must hold "key: value" lines, not a {type(content).__name__}; see '
                              'docs/checkpoints.md')
    return content


def check_types(content: Mapping[str, Any], types: Mapping[str, type], where: str, others: bool = False) -> None:
    """Raise CheckpointError for a key that has another type than in ``types``, or is none of them unless ``others``."""
    for key, value in content.items():
        if key not in types:
            if others:
                continue
            raise CheckpointError(f'{where} has the unknown key {key!r}; known are {", ".join(types)}')
        kind = types[key]
        fits = isinstance(value, (int, float) if kind is float else kind)
        if not fits or (isinstance(value, bool) and kind is not bool):
            raise CheckpointError(f'{where}: {key} must be {TYPE_NAMES[kind]}, not {value!r}; correct it or export the '
                                  'checkpoint again')


def with_options(raw: Mapping[str, Any], options: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """A LeRobot config.json with the options of ``path`` as its keys."""
    check_types(options, LEROBOT_OPTIONS, str(path))
    # Whatever a policy computes in, its weights have learnt the frequencies of the type it was trained in.
    trained = {'rmuscle_rounded_rope': raw.get('dtype') == 'bfloat16'} if 'dtype' in options else {}
    return {**trained, **raw, **{key if key == 'dtype' else f'rmuscle_{key}': value for key, value in options.items()}}
