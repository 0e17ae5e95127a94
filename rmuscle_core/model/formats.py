# SPDX-License-Identifier: Apache-2.0
"""Which kind of checkpoint a directory holds, and its configuration in LeRobot's terms whatever wrote it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rmuscle_core.errors import CheckpointError
from rmuscle_core.model.options import OPTIONS, read_json, read_yaml, with_options
from rmuscle_core.model.profile import Profile, lerobot_config, read_profile
from rmuscle_core.model.weights import INDEX, SINGLE

# LeRobot's "type" or transformers' "model_type" -> the name people know; docs/adding-a-model.md says what they need
NOT_YET = {'smolvla': 'SmolVLA', 'groot': 'GR00T', 'gr00t': 'GR00T', 'gr00t_n1': 'GR00T N1',
           'gr00t_n1_5': 'GR00T N1.5', 'gr00t_n1_7': 'GR00T N1.7', 'pi0_fast': 'pi0-FAST', 'pi0fast': 'pi0-FAST'}
KINDS = ('pi05', 'pi0')
PICKLES = ('*.bin', '*.pt', '*.pth', '*.ckpt', '*.pkl')


@dataclass(frozen=True)
class Source:
    """A recognised checkpoint directory.

    raw: the content of LeRobot's config.json, or what it would be. profile: what openpi keeps in its code, else None.
    described_by: the file to correct when raw is wrong.
    """

    directory: Path
    raw: dict[str, Any]
    described_by: Path
    profile: Profile | None = None


def open_source(directory: str | Path) -> Source:
    """Recognise a LeRobot or openpi checkpoint by its small files; raises CheckpointError for any other by name."""
    directory = Path(directory)
    path, own = directory / 'config.json', directory / OPTIONS
    options = read_yaml(own) if own.exists() else {}
    openpi = 'profile' in options or ((directory / 'assets').is_dir() and not path.exists())
    raw = {} if openpi and not path.exists() else read_json(path)
    name = str(raw.get('type') or raw.get('model_type') or '').lower()
    gr00t = 'gr00t' in str(raw.get('architectures')).lower()
    if gr00t or name in NOT_YET or (name and name not in KINDS):
        raise CheckpointError(f'{path} is that of a {"GR00T" if gr00t else NOT_YET.get(name, name)} policy, which '
                              f'rMuscle does not run yet; use one of {", ".join(KINDS)} (docs/adding-a-model.md says '
                              'what an adapter needs)')
    if 'type' not in raw and (openpi or 'action_horizon' in raw):
        profile = read_profile(directory, options)
        return Source(directory, lerobot_config(profile, raw, path), own, profile)
    return Source(directory, with_options(raw, options, own), path)


def require_weights(directory: Path) -> None:
    """Raise CheckpointError that says what a directory without safetensors weights is instead."""
    if not directory.is_dir():
        raise CheckpointError(f'there is no checkpoint directory {directory}; download it first (hf download NAME '
                              '--local-dir DIR) and point to that folder')
    if (directory / SINGLE).exists() or (directory / INDEX).exists():
        return
    for inner in ('pretrained_model', 'checkpoints/last/pretrained_model'):
        if (directory / inner).is_dir():
            raise CheckpointError(f'{directory} is the folder of a training run; point to {directory / inner}')
    if (directory / 'adapter_model.safetensors').exists() or (directory / 'adapter_config.json').exists():
        raise CheckpointError(f'{directory} holds an adapter (PEFT) without its base model; merge it into the base '
                              'model with LeRobot and point to the merged checkpoint')
    if (directory / '_METADATA').exists() or (directory / 'params').is_dir():
        raise CheckpointError(f'{directory} is a JAX checkpoint of openpi; convert it with openpi\'s '
                              'examples/convert_jax_model_to_pytorch.py and point to the result')
    pickles = sorted(path.name for pattern in PICKLES for path in directory.glob(pattern))
    if pickles:
        raise CheckpointError(f'{directory} has its weights only in {", ".join(pickles[:3])}, and pickle files are '
                              'never loaded since they can run code; save it as model.safetensors with LeRobot')
    raise CheckpointError(f'there is no {directory / SINGLE}; point to a complete LeRobot checkpoint directory '
                          '(usually .../pretrained_model) or an openpi PyTorch one')
