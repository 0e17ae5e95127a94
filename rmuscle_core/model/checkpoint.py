# SPDX-License-Identifier: Apache-2.0
"""A model out of a checkpoint directory, and into one in LeRobot's layout."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rmuscle_core.device import open_device
from rmuscle_core.errors import CheckpointError
from rmuscle_core.memory_free import available_bytes
from rmuscle_core.model.checkpoint_config import config_json, load_config
from rmuscle_core.model.layout import is_dead, tensor_views
from rmuscle_core.model.vla import VLA
from rmuscle_core.model.weights import SINGLE, Weights


def load_model(directory: str | Path, device: torch.device | str = 'cpu', dtype: str | None = None,
               numerics: str = 'lerobot', rounded_rope: bool | None = None,
               weight_dtype: str = 'checkpoint', steps: int | None = None) -> VLA:
    """Load a pi0 / pi0.5 checkpoint, frozen and in eval mode, tensor by tensor straight to its place.

    dtype, rounded_rope, steps: None follows config.json (see ModelConfig). weight_dtype: 'fp8' quantises each FFN after
    all are read. Raises CheckpointError that names every missing, unexpected or misshapen tensor; nothing is ever left
    at random values. Raises SettingsError for a device that is not here.
    """
    device = open_device(device)
    config = replace(load_config(directory), numerics=numerics)
    if dtype is not None:
        config = replace(config, dtype=dtype)
    if rounded_rope is not None:
        config = replace(config, rounded_rope=rounded_rope)
    if steps is not None:
        config = replace(config, steps=steps)
    if weight_dtype == 'fp8':
        # Here, since 8-bit weights bring in the kernels, which a training machine need not have.
        from rmuscle_core.model.quantized import quantize_ffns, require_fp8
        require_fp8(device)
    with torch.device('meta'):
        model = VLA(config)
    _check_memory(model, device)
    model.to_empty(device=device)
    model.make_tables()
    _read_weights(Weights(Path(directory)), model)
    if weight_dtype == 'fp8':
        quantize_ffns(model)
    model.eval().requires_grad_(False)
    model.modulations()
    return model


def save_checkpoint(model: VLA, directory: str | Path, extra_config: Mapping[str, Any] | None = None,
                    storage: torch.dtype | None = None) -> None:
    """Write config.json and model.safetensors as LeRobot does; what cannot reach the actions is left out.

    extra_config: further config.json keys, or replacements. storage: dtype of every tensor in the file, None as held.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {f'model.{name}': view.to('cpu', storage).contiguous().clone()
               for name, view in tensor_views(model).items()}
    # A reader never meets half a file, and an interrupted training keeps its last checkpoint.
    partial = directory / f'.{SINGLE}'
    save_file(tensors, partial, metadata={'format': 'pt'})
    os.replace(partial, directory / SINGLE)
    config = {**config_json(model.config), **(extra_config or {})}
    (directory / 'config.json').write_text(json.dumps(config, indent=4) + '\n')


def _read_weights(weights: Weights, model: VLA) -> None:
    views = tensor_views(model)
    missing = [name for name in views if name not in weights]
    unexpected = [name for name in weights if name not in views and not is_dead(name, model.config.prefix.layers)]
    misshapen = [f'{name} {weights.shape(name)} instead of {tuple(view.shape)}' for name, view in views.items()
                 if name in weights and weights.shape(name) != tuple(view.shape)]
    for fault, names in (('lacks', missing), ('holds unexpected', unexpected), ('holds misshapen', misshapen)):
        if names:
            raise CheckpointError(f'{weights.path} {fault} {len(names)} tensor{"s" * (len(names) > 1)}: '
                                  f'{", ".join(sorted(names))}; load and re-save the checkpoint with LeRobot 0.4 '
                                  'or later, or download it again')
    for name, view in views.items():
        weights.read_into(name, view)


def _check_memory(model: VLA, device: torch.device) -> None:
    needed = sum(x.numel() * x.element_size() for x in model.parameters())
    free = available_bytes(device)
    if needed > free:
        raise CheckpointError(f'the weights need {needed / 1e9:.1f} GB as {model.config.dtype} but {device} has '
                              f'{free / 1e9:.1f} GB free; free memory or choose dtype bfloat16')
