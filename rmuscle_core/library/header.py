# SPDX-License-Identifier: Apache-2.0
"""What an episode file says about itself, checked before any of it is believed."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import h5py
import numpy as np

from rmuscle_core.errors import EpisodeError
from rmuscle_core.library.hdf5_file import only_hard_links
from rmuscle_core.library.reference import ReferenceId

FORMAT, VERSION = 'rmuscle-episode', 1
_MAX_HEADER = 64 << 20
# dataset -> (stored dtype, dimensions); all but the neurons are in every call
DATASETS = {'prefix': ('<u2', 2), 'token_ids': ('<i4', 1), 'states': ('<f4', 2), 'key': ('<f4', 2),
            'neurons': ('<u2', 3), 'chunk': ('<f4', 2)}
OPTIONAL = {'neurons'}


@dataclass(frozen=True)
class Header:
    """calls: one mapping per call with 'views' and 'datasets' (name -> dtype, shape, blake2b)."""

    task: str
    episode: str
    success: bool
    fingerprint: dict[str, str]
    calls: list[dict[str, Any]]

    def id(self, call: int) -> ReferenceId:
        return ReferenceId(self.task, self.episode, call)

    def views(self, call: int) -> tuple[str, ...]:
        return tuple(self.calls[call]['views'])


def read(file: h5py.File) -> Header:
    """The header of an open file; raises EpisodeError saying what is wrong with it."""
    kind, version = file.attrs.get('format'), file.attrs.get('version')
    # a foreign file may have arrays here, whose comparison is no truth value
    if not isinstance(kind, str) or not isinstance(version, (int, np.integer)) or (kind, version) != (FORMAT, VERSION):
        raise EpisodeError(f'expected {FORMAT} version {VERSION}, found {str(kind)[:40]} version {str(version)[:40]}')
    only_hard_links(file, 'header')
    dataset = file['header']
    if dataset.shape != () or dataset.dtype.kind != 'S' or dataset.dtype.itemsize > _MAX_HEADER:
        raise EpisodeError(f'its header is {dataset.dtype} {dataset.shape}, expected one string')
    check_storage(dataset, dataset.dtype.itemsize)
    text = bytes(dataset[()])
    if digest(text) != file.attrs['header_blake2b']:
        raise EpisodeError('the checksum of its header does not match')
    content, expected = json.loads(text), [field.name for field in fields(Header)]
    if not isinstance(content, dict) or sorted(content) != sorted(expected):
        raise EpisodeError(f'its header holds {", ".join(sorted(content))[:80]}, expected {", ".join(expected)}'
                           if isinstance(content, dict) else 'its header is no mapping')
    header = Header(**content)
    _check(header)
    return header


def check_storage(dataset: h5py.Dataset, size: int) -> None:
    """A dataset may claim any shape; only plain contiguous storage of just that size is read."""
    if dataset.chunks is not None or dataset.external or dataset.is_virtual or dataset.id.get_storage_size() != size:
        raise EpisodeError(f'{dataset.name} claims {size} bytes in one piece, which the file does not hold')


def digest(data: bytes | np.ndarray) -> str:
    """BLAKE2b-128 of bytes, or of an array's bytes in C order."""
    flat = data if isinstance(data, bytes) else data.reshape(-1).view(np.uint8)  # hashlib takes one dimension only
    return hashlib.blake2b(flat, digest_size=16).hexdigest()


def _check(header: Header) -> None:
    """A checksum proves that nothing changed since it was written, not that it was written well."""
    facts = [isinstance(header.task, str), isinstance(header.episode, str), isinstance(header.success, bool),
             isinstance(header.fingerprint, dict), isinstance(header.calls, list) and bool(header.calls)]
    if not all(facts) or not all(isinstance(value, str) for value in header.fingerprint.values()):
        raise EpisodeError('its header does not hold task, episode, success, fingerprint and calls as specified')
    for number, call in enumerate(header.calls):
        problem = _call_problem(call)
        if problem:
            raise EpisodeError(f'its header describes call {number} wrongly: {problem}')


def _call_problem(call: Any) -> str:
    if not isinstance(call, dict) or set(call) != {'views', 'datasets'}:
        return 'expected views and datasets'
    views, datasets = call['views'], call['datasets']
    if not isinstance(views, list) or not views or not all(isinstance(view, str) for view in views):
        return f'views are {str(views)[:80]}, expected camera names'
    if not isinstance(datasets, dict) or not DATASETS.keys() - OPTIONAL <= datasets.keys() <= DATASETS.keys():
        return f'expected the datasets {", ".join(DATASETS)}'
    for name, entry in datasets.items():
        if not isinstance(entry, dict) or not _is_shape(entry.get('shape'), DATASETS[name][1]):
            return f'{name} has no shape of {DATASETS[name][1]} positive sizes'
    return _disagreement(len(views), {name: entry['shape'] for name, entry in datasets.items()})


def _is_shape(shape: Any, dimensions: int) -> bool:
    return (isinstance(shape, list) and len(shape) == dimensions
            and all(type(size) is int and size > 0 for size in shape) and math.prod(shape) < 1 << 40)


def _disagreement(views: int, shapes: Mapping[str, list[int]]) -> str:
    if shapes['key'][0] != views:
        return f'key has {shapes["key"][0]} rows for {views} views'
    if shapes['prefix'][0] % views:
        return f'prefix has {shapes["prefix"][0]} tokens, which {views} views cannot share equally'
    return ''
