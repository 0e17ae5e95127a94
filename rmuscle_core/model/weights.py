# SPDX-License-Identifier: Apache-2.0
"""Weights on disk, one safetensors file or several, read piece by piece straight to where they are used."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from rmuscle_core.errors import CheckpointError, reason
from rmuscle_core.model.layout import EMBEDDING, LANGUAGE_HEAD, canonical

SINGLE, INDEX = 'model.safetensors', 'model.safetensors.index.json'
DTYPES = {'F64': torch.float64, 'F32': torch.float32, 'F16': torch.float16, 'BF16': torch.bfloat16}
BLOCK = 32 << 20  # bytes read at a time


@dataclass(frozen=True)
class Stored:
    """Where one tensor's bytes are."""

    path: Path
    start: int
    nbytes: int
    dtype: str  # safetensors' name
    shape: tuple[int, ...]


class Weights(dict[str, Stored]):
    """Canonical tensor name -> Stored, for every tensor of a checkpoint directory; only headers are read.

    Raises CheckpointError for files that are absent, damaged or hold one tensor twice.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.path = directory / SINGLE
        for path in weight_files(directory):
            for key, stored in read_header(path):
                name = canonical(key)
                if name in self:
                    raise CheckpointError(f'{path} holds {name} a second time (as {key}); save the checkpoint again '
                                          'under one spelling of the names')
                self[name] = stored
        if EMBEDDING not in self and LANGUAGE_HEAD in self:
            # Tied models are saved under the name of the head alone.
            self[EMBEDDING] = self[LANGUAGE_HEAD]

    def __missing__(self, name: str) -> Stored:
        raise CheckpointError(f'{self.path} has no tensor {name}, so it is no complete pi0 or pi0.5 checkpoint in '
                              'LeRobot 0.4+ layout; load and re-save it with LeRobot')

    def shape(self, name: str) -> tuple[int, ...]:
        return self[name].shape

    def count(self, stack: str) -> int:
        """Layers of a stack, from the indices after ``layers.``."""
        start = stack + 'layers.'
        return 1 + max((int(name[len(start):].split('.')[0]) for name in self if name.startswith(start)), default=-1)

    def read_into(self, name: str, target: torch.Tensor) -> None:
        """Copy a tensor into a contiguous one of any floating dtype and device; takes BLOCK bytes, not the tensor's.

        Read, not mapped: a mapped file would stay in the process's memory beside the weights made from it.
        """
        stored = self[name]
        if stored.dtype not in DTYPES:
            raise CheckpointError(f'{stored.path} stores {name} as {stored.dtype}; expected one of '
                                  f'{", ".join(DTYPES)}, so use the checkpoint before it was quantised')
        dtype, flat = DTYPES[stored.dtype], target.view(-1)
        step = BLOCK // dtype.itemsize
        with stored.path.open('rb', buffering=0) as file:
            file.seek(stored.start)
            for begin in range(0, flat.numel(), step):
                part = flat[begin:begin + step]
                block = torch.empty(len(part), dtype=dtype)
                _fill(file, block, stored.path)
                part.copy_(block)


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint: the one there is, or those its index names."""
    index = directory / INDEX
    if (directory / SINGLE).exists() or not index.exists():
        return [directory / SINGLE]
    try:
        names = sorted(set(json.loads(index.read_text())['weight_map'].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f'{index} is not a readable index of weight files ({reason(error)}); copy the directory '
                              'again') from error
    outside = [name for name in names if Path(str(name)).name != name]
    if outside or not names:
        raise CheckpointError(f'{index} must name files of its own directory, not {outside[:1] or names}; copy the '
                              'directory again')
    return [directory / name for name in names]


def read_header(path: Path) -> Iterator[tuple[str, Stored]]:
    """Yield key and Stored of each tensor in one file; raises CheckpointError when it is damaged or cut."""
    try:
        with safe_open(path, 'pt'):  # checks that header and length of the file belong together
            pass
        with path.open('rb') as file:
            length = int.from_bytes(file.read(8), 'little')
            header = json.loads(file.read(length))
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f'cannot read the weights {path} ({reason(error)}); copy the checkpoint directory '
                              'again') from error
    header.pop('__metadata__', None)
    for key, entry in header.items():
        begin, end = entry['data_offsets']
        yield key, Stored(path, 8 + length + begin, end - begin, entry['dtype'], tuple(entry['shape']))


def _fill(file, block: torch.Tensor, path: Path) -> None:
    room = memoryview(block.view(torch.uint8).numpy())
    while room:
        count = file.readinto(room)
        if not count:
            raise CheckpointError(f'{path} ended while it was read; copy it again and leave it alone meanwhile')
        room = room[count:]
