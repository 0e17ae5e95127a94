# SPDX-License-Identifier: Apache-2.0
"""What a library was made with: cached states fit only the weights and the preprocessing they came from."""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rmuscle_core.errors import CheckpointError, LibraryError
from rmuscle_core.processing import Processor

if TYPE_CHECKING:
    from rmuscle_core.model import VLA


def fingerprint(checkpoint: str | Path, model: VLA, processor: Processor | None = None,
                **further: str) -> dict[str, str]:
    """Field name -> plain text; references may be shared only between equal fingerprints.

    processor: the one in use, by default what the checkpoint defines.
    further: facts the checkpoint does not hold, such as ``joints='waist shoulder ...'``; an empty one is not compared.
    """
    config = model.config
    processor = processor or Processor.from_checkpoint(checkpoint, config)
    sizes = asdict(config)
    own = {name: sizes.pop(name) for name in ('cameras', 'dtype', 'numerics', 'weight_dtype')}
    described = json.dumps(sizes, sort_keys=True)
    return {
        'weights': weights_digest(Path(checkpoint) / 'model.safetensors'),
        'model': f'{config.kind} {hashlib.blake2b(described.encode(), digest_size=8).hexdigest()}',
        'cameras': ' '.join(own['cameras']),
        'numerics': f'{own["dtype"]} {own["numerics"]}' + (' fp8' if own['weight_dtype'] == 'fp8' else ''),
        **processor.report(),
        **further,
    }


def weights_digest(path: Path) -> str:
    """Hash of every tensor's name, dtype, shape and bytes; order in the file and file metadata do not count.

    Reads the safetensors file directly, so that no tensor is copied: hashing runs at the speed of disk and cores.
    """
    try:
        with path.open('rb') as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            start = 8 + int.from_bytes(content[:8], 'little')
            header = json.loads(content[8:start])
            header.pop('__metadata__', None)
            with memoryview(content) as view, ThreadPoolExecutor() as pool:
                tensors = sorted(header.items())
                digests = list(pool.map(lambda item: _tensor_digest(view, start, *item), tensors))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f'{path} is not a readable safetensors file ({type(error).__name__}: {error}); '
                              'copy the checkpoint again') from error
    return hashlib.blake2b(b''.join(digests), digest_size=16).hexdigest()


def _tensor_digest(view: memoryview, start: int, name: str, entry: Mapping) -> bytes:
    begin, end = entry['data_offsets']
    hashed = hashlib.blake2b(json.dumps([name, entry['dtype'], entry['shape']]).encode(), digest_size=16)
    with view[start + begin:start + end] as data:
        if len(data) != end - begin:
            raise ValueError(f'tensor {name} reaches beyond the end of the file')
        hashed.update(data)
    return hashed.digest()


# every library says these; others are facts that not every caller knows
_ALWAYS = ('weights', 'model', 'cameras', 'numerics', 'images', 'prompt', 'tokenizer', 'state normalization',
           'action normalization', 'relative actions', 'masks')


def differences(stored: Mapping[str, str], present: Mapping[str, str]) -> list[str]:
    """One phrase per field that differs; a further fact that either side leaves empty is not compared."""
    fields = [name for name in {**present, **stored} if name in _ALWAYS or (present.get(name) and stored.get(name))]
    return [f'{name} (library: {stored.get(name) or "unknown"}; here: {present.get(name) or "unknown"})'
            for name in fields if stored.get(name) != present.get(name)]


def check_same(stored: Mapping[str, str], present: Mapping[str, str], where: Path) -> None:
    """Raise LibraryError naming each field in which the two fingerprints differ."""
    found = differences(stored, present)
    if found:
        raise LibraryError(f'library {where} was made with another {" and another ".join(found)}; build a library with '
                           'this checkpoint (rmuscle library build) or point to the one that belongs to it')
