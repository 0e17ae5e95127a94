# SPDX-License-Identifier: Apache-2.0
"""What a library was made with: cached states fit only the weights and the preprocessing they came from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rmuscle_core.errors import LibraryError
from rmuscle_core.model.weights import Stored, read_header, weight_files
from rmuscle_core.processing import Processor

if TYPE_CHECKING:
    from rmuscle_core.model import VLA

BLOCK = 8 << 20  # bytes hashed at a time, per core


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
        'weights': weights_digest(*weight_files(Path(checkpoint))),
        'model': f'{config.kind} {hashlib.blake2b(described.encode(), digest_size=8).hexdigest()}',
        'cameras': ' '.join(own['cameras']),
        'numerics': f'{own["dtype"]} {own["numerics"]}' + (' fp8' if own['weight_dtype'] == 'fp8' else ''),
        **processor.report(),
        **further,
    }


def weights_digest(*paths: Path) -> str:
    """Hash of every tensor's name, dtype, shape and bytes; order, spread over files and file metadata do not count."""
    tensors = sorted((item for path in paths for item in read_header(path)), key=lambda item: item[0])
    with ThreadPoolExecutor() as pool:
        digests = list(pool.map(lambda item: _tensor_digest(*item), tensors))
    return hashlib.blake2b(b''.join(digests), digest_size=16).hexdigest()


def _tensor_digest(name: str, stored: Stored) -> bytes:
    hashed = hashlib.blake2b(json.dumps([name, stored.dtype, stored.shape]).encode(), digest_size=16)
    # Read, not mapped: a mapped file would count as this process's memory beside the model made from it.
    with stored.path.open('rb', buffering=0) as file:
        file.seek(stored.start)
        for begin in range(0, stored.nbytes, BLOCK):
            hashed.update(file.read(min(BLOCK, stored.nbytes - begin)))
    return hashed.digest()


# every library says these; others are facts that not every caller knows
_ALWAYS = ('weights', 'model', 'cameras', 'numerics', 'images', 'prompt', 'tokenizer', 'state normalization',
           'action normalization', 'relative actions', 'masks')


def differences(stored: Mapping[str, str], present: Mapping[str, str]) -> list[str]:
    """One phrase per field that differs; a further fact that either side leaves empty is not compared."""
    fields = [name for name in {**present, **stored} if name in _ALWAYS or (present.get(name) and stored.get(name))]
    return [f'{name[:80]} (library: {stored.get(name, "")[:120] or "unknown"}; here: '
            f'{present.get(name, "")[:120] or "unknown"})'
            for name in fields if stored.get(name) != present.get(name)]


def check_same(stored: Mapping[str, str], present: Mapping[str, str], where: Path) -> None:
    """Raise LibraryError naming each field in which the two fingerprints differ."""
    found = differences(stored, present)
    if found:
        raise LibraryError(f'library {where} was made with another {" and another ".join(found)}; build a library with '
                           'this checkpoint (rmuscle library build) or point to the one that belongs to it')
