# SPDX-License-Identifier: Apache-2.0
"""What openpi keeps in its Python configuration instead of the checkpoint: an openpi directory needs it as a file.

``rmuscle.yaml`` in the checkpoint directory names a shipped profile (``profile: libero``), changes some of its keys, or
states all of them. The keys are the fields of Profile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from rmuscle_core.errors import CheckpointError
from rmuscle_core.model.options import OPTIONS, check_types, read_yaml
from rmuscle_core.shipped import shipped

SLOTS = ('base_0_rgb', 'left_wrist_0_rgb', 'right_wrist_0_rgb')  # in the order in which openpi's model sees them
SHIPPED = ('libero', 'droid', 'aloha')
MODELS = ('pi05', 'pi0')
ALOHA_JOINTS = 14


@dataclass(frozen=True)
class Profile:
    """One robot's way of using an openpi model.

    cameras: the robot's camera name -> the model's slot. relative: runs of action dimensions, as in openpi's
    make_bool_mask: 6 means six actions relative to the state, -1 one absolute action; what is not listed is absolute.
    adapt_to_pi: convert joint signs and grippers between standard ALOHA and the base model's space.
    state_in_prompt: pi0.5 only; False reproduces discrete_state_input=False, where the state is not used at all.
    asset_id: folder under assets/ with norm_stats.json; empty when there is only one.
    """

    model: str
    cameras: dict[str, str]
    state_dim: int
    action_dim: int
    action_horizon: int
    execute_steps: int = 0  # 0: the whole horizon
    steps: int = 10
    prompt_length: int = 0  # 0: 200 for pi05, 48 for pi0
    state_in_prompt: bool = True
    relative: list[int] = field(default_factory=list)
    adapt_to_pi: bool = False
    asset_id: str = ''
    dtype: str = 'bfloat16'
    tokenizer: str = ''
    rounded_rope: bool | None = None
    vision_heads: int = 16


_TYPES = {f.name: {'str': str, 'int': int, 'bool': bool, 'bool | None': bool, 'dict[str, str]': dict,
                   'list[int]': list}[f.type] for f in fields(Profile)}
_REQUIRED = [f.name for f in fields(Profile) if f.default is MISSING and f.default_factory is MISSING]


def read_profile(directory: Path, options: Mapping[str, Any]) -> Profile:
    """The profile that ``options``, the content of the directory's rmuscle.yaml, describe.

    Raises CheckpointError naming the key, or how to choose a profile where there is none.
    """
    path = directory / OPTIONS
    if not options:
        raise CheckpointError(f'{directory} is an openpi checkpoint, which does not say how its robot uses the model; '
                              f'write "profile: NAME" into {path}, NAME one of {", ".join(SHIPPED)}, or every key '
                              'that docs/checkpoints.md lists')
    content = dict(options)
    if 'profile' in content:
        content = {**_shipped(content.pop('profile'), path), **content}
    check_types(content, _TYPES, str(path))
    missing = [key for key in _REQUIRED if key not in content]
    if missing:
        raise CheckpointError(f'{path} lacks {", ".join(missing)}; add them, or start from "profile: '
                              f'{SHIPPED[0]}" (docs/checkpoints.md)')
    profile = Profile(**content)
    _check(profile, path)
    return profile


def lerobot_config(profile: Profile, raw: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """What LeRobot's config.json would say; ``raw`` is openpi's, from ``path``, which must not contradict."""
    horizon = raw.get('action_horizon', profile.action_horizon)
    if horizon != profile.action_horizon:
        raise CheckpointError(f'{path} says action_horizon {horizon} but {path.parent / OPTIONS} '
                              f'{profile.action_horizon}; set action_horizon there to what the policy was trained with')
    length = profile.prompt_length or {'pi05': 200, 'pi0': 48}[profile.model]
    rope = {} if profile.rounded_rope is None else {'rmuscle_rounded_rope': profile.rounded_rope}
    tokenizer = {'rmuscle_tokenizer': profile.tokenizer} if profile.tokenizer else {}
    cameras = {f'observation.images.{slot}': {'type': 'VISUAL'} for slot in SLOTS if slot in profile.cameras.values()}
    sizes = {'max_action_dim': raw['action_dim']} if 'action_dim' in raw else {}
    variants = {key: raw[key] for key in ('paligemma_variant', 'action_expert_variant') if key in raw}
    return {'type': profile.model, 'dtype': profile.dtype, 'chunk_size': horizon,
            'n_action_steps': profile.execute_steps or horizon, 'num_inference_steps': profile.steps,
            'tokenizer_max_length': length, 'rmuscle_vision_heads': profile.vision_heads,
            'input_features': {**cameras, 'observation.state': {'type': 'STATE', 'shape': [profile.state_dim]}},
            'output_features': {'action': {'type': 'ACTION', 'shape': [profile.action_dim]}},
            **sizes, **variants, **rope, **tokenizer}


def _shipped(name: Any, path: Path) -> dict[str, Any]:
    if name not in SHIPPED:
        raise CheckpointError(f'{path}: profile must be one of {", ".join(SHIPPED)}, not {name!r}; for another robot '
                              'leave "profile" out and state its keys (docs/checkpoints.md)')
    if found := shipped(f'openpi/{name}.yaml'):
        return read_yaml(found)
    raise CheckpointError(f'the shipped profile {name}.yaml is not installed; copy config/openpi/{name}.yaml from the '
                          f'source to {path}')


def _check(profile: Profile, path: Path) -> None:
    slots = list(profile.cameras.values())
    runs = profile.relative
    size = sum(abs(n) for n in runs if isinstance(n, int))
    aloha = (ALOHA_JOINTS, ALOHA_JOINTS)
    rules = (
        ('model', profile.model in MODELS, f'one of {", ".join(MODELS)}', profile.model),
        ('cameras', bool(slots) and all(slot in SLOTS for slot in slots) and max(map(slots.count, SLOTS)) == 1,
         f'name: slot, each slot of {", ".join(SLOTS)} at most once', profile.cameras),
        ('relative', all(isinstance(n, int) and n for n in runs)
         and size <= min(profile.action_dim, profile.state_dim), 'whole numbers that together name no more dimensions '
         f'than the {profile.action_dim} actions and {profile.state_dim} state values', runs),
        ('state_in_prompt', profile.state_in_prompt or profile.model == 'pi05', 'left out for pi0', False),
        ('adapt_to_pi', not profile.adapt_to_pi or (profile.state_dim, profile.action_dim) == aloha,
         f'false unless state_dim and action_dim are {ALOHA_JOINTS}', True),
        *((name, getattr(profile, name) >= low, f'at least {low}', getattr(profile, name)) for name, low in
          (('state_dim', 1), ('action_dim', 1), ('action_horizon', 1), ('execute_steps', 0), ('steps', 1),
           ('prompt_length', 0), ('vision_heads', 1))))
    for name, holds, allowed, found in rules:
        if not holds:
            raise CheckpointError(f'{path}: {name} must be {allowed}, not {found!r}')
