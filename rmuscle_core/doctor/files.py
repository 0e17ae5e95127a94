# SPDX-License-Identifier: Apache-2.0
"""A checkpoint and a library, as far as they can be judged without loading weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from rmuscle_core.doctor.finding import FAIL, OK, WARN, Finding
from rmuscle_core.engine.budget import memory_budget
from rmuscle_core.errors import RMuscleError
from rmuscle_core.library import EpisodeLibrary
from rmuscle_core.memory_free import available_bytes
from rmuscle_core.model import load_config
from rmuscle_core.processing import Processor
from rmuscle_core.settings import Settings


def checkpoint(path: Path, device: torch.device) -> Iterator[Finding]:
    """Its configuration, its processors with their tokenizer, and whether the device holds it with its references."""
    try:
        config = load_config(path)
    except RMuscleError as error:
        yield _refused('checkpoint', error)
        return
    yield Finding(OK, 'checkpoint', f'{path}: {config.kind}, cameras {", ".join(config.cameras)}, '
                  f'{config.action_dim} joints, chunks of {config.chunk_size}')
    try:
        processor = Processor.from_checkpoint(path, config)
    except RMuscleError as error:
        yield _refused('processors', error)
    else:
        yield Finding(OK, 'processors', f'tokenizer {processor.tokenizer.name}')
    need = memory_budget(config, Settings(), len(config.cameras))['total']
    free = available_bytes(device)
    short = need > free
    yield Finding(FAIL if short else OK, 'memory for it', f'{need / 1e9:.1f} GB with {Settings().slots} reference '
                  f'slots, {device} has {free / 1e9:.1f} GB', 'lower slots, or set weight_dtype = fp8' if short else '')


def library(path: Path) -> Iterator[Finding]:
    """Whether it opens, and what is wrong with single episodes; changes nothing.

    ``rmuscle library verify`` reads every byte.
    """
    try:
        opened = EpisodeLibrary.open(path, set_aside=False)
    except RMuscleError as error:
        yield _refused('library', error)
        return
    text = f'{path}: {len(opened.episodes)} episodes, {opened.nbytes / 1e6:.1f} MB'
    if opened.problems:
        yield Finding(WARN, 'library', f'{text}; {len(opened.problems)} unusable, first: {opened.problems[0]}',
                      f'rmuscle library verify --repair {path}')
    else:
        yield Finding(OK, 'library', text)


def _refused(name: str, error: RMuscleError) -> Finding:
    reason, _, fix = str(error).rpartition('; ')
    return Finding(FAIL, name, reason or fix, fix if reason else '')
