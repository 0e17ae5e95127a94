# SPDX-License-Identifier: Apache-2.0
"""One episode file (HDF5), as specified in docs/library-format.md: written once, checked on every read."""

from __future__ import annotations

import errno
import json
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from rmuscle_core.errors import EpisodeError, reason
from rmuscle_core.library.durable import appearing, sync
from rmuscle_core.library.hdf5_file import only_hard_links, writing
from rmuscle_core.library.header import DATASETS, FORMAT, VERSION, Header, check_storage, digest
from rmuscle_core.library.header import read as read_header_of
from rmuscle_core.library.reference import Reference

_PASSING = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM, errno.ESTALE, errno.ENOENT,
            errno.EINTR}


def write_episode(path: Path, task: str, success: bool, fingerprint: Mapping[str, str],
                  references: Sequence[Reference], on_stage: Callable[[str], None] = lambda stage: None) -> None:
    """Write the episode so that ``path`` is either absent or whole; the file is read back before it appears.

    on_stage: told 'call 0', 'call 1', ..., 'closed', 'verified' and 'visible' as each is reached.
    Raises EpisodeError when a reference holds non-finite or misshapen values.
    """
    with appearing(path) as temporary:
        with writing(temporary) as file:
            calls = []
            for number, reference in enumerate(references):
                group = file.create_group(f'calls/{number:05d}')
                arrays = _arrays(reference)
                for name, array in arrays.items():
                    group.create_dataset(name, data=array)
                described = {name: _describe(array) for name, array in arrays.items()}
                calls.append({'views': list(reference.views), 'datasets': described})
                file.check()
                on_stage(f'call {number}')
            header = Header(task, path.stem, bool(success), dict(fingerprint), calls)
            text = json.dumps(asdict(header)).encode()
            file.create_dataset('header', data=np.bytes_(text))
            file.attrs['format'], file.attrs['version'] = FORMAT, VERSION
            file.attrs['header_blake2b'] = digest(text)
            file.flush()
        sync(temporary)
        on_stage('closed')
        verify_episode(temporary)
        on_stage('verified')
    on_stage('visible')


def read_header(path: Path) -> tuple[Header, list[np.ndarray], list[np.ndarray]]:
    """Header, keys [V,C] and states [h,S] of every call: what retrieval needs, without the large datasets."""
    with _opened(path) as file:
        header = read_header_of(file)
        groups = [_group(file, number) for number in range(len(header.calls))]
        read = [(_read(group, call, 'key'), _read(group, call, 'states'))
                for group, call in zip(groups, header.calls, strict=True)]
        return header, [key for key, _ in read], [states for _, states in read]


def read_reference(path: Path, call: int) -> Reference:
    """Read one call; raises EpisodeError naming the file and what is wrong."""
    with _opened(path) as file:
        return _reference(file, read_header_of(file), call)


def verify_episode(path: Path) -> Header:
    """Read everything and compare it with its checksums; raises EpisodeError naming the first thing that is wrong."""
    with _opened(path) as file:
        header = read_header_of(file)
        for call in range(len(header.calls)):
            _reference(file, header, call)
        return header


@contextmanager
def _opened(path: Path) -> Iterator[h5py.File]:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise EpisodeError('it is not a regular file')  # opening a pipe would wait for ever
        # the file never changes once it is visible, and a lock would fail on read-only media
        with h5py.File(path, 'r', locking=False) as file:
            yield file
    except Exception as error:  # on a damaged file HDF5 raises OSError, KeyError, RuntimeError, ValueError and others
        raise EpisodeError(f'episode {path} is unusable: {reason(error)}; restore the file or record the episode again'
                           ) from error


def is_damage(error: EpisodeError) -> bool:
    """Whether the file itself is at fault, and not the machine at this moment (permission, memory, open files)."""
    cause = error.__cause__
    return not isinstance(cause, MemoryError) and getattr(cause, 'errno', None) not in _PASSING


def _group(file: h5py.File, call: int) -> h5py.Group:
    name = f'calls/{call:05d}'
    only_hard_links(file, name)
    return file[name]


def _reference(file: h5py.File, header: Header, call: int) -> Reference:
    if not 0 <= call < len(header.calls):
        raise EpisodeError(f'it has {len(header.calls)} calls, call {call} was asked for')
    described, group = header.calls[call], _group(file, call)
    data = {name: _read(group, described, name) for name in described['datasets']}
    prefix = torch.from_numpy(data.pop('prefix').view(np.int16)).view(torch.bfloat16)
    neurons = data.pop('neurons', None)
    return Reference(id=header.id(call), prefix=prefix, views=header.views(call), neurons=neurons, **data)


def _read(group: h5py.Group, described: Mapping[str, Any], name: str) -> np.ndarray:
    """Read one dataset, after checking that no more is allocated than the file really holds."""
    only_hard_links(group, name)
    expected, where = described['datasets'][name], f'{group.name}/{name}'
    dataset, (dtype, dimensions) = group[name], DATASETS[name]
    found = [dataset.dtype.str, list(dataset.shape)]
    if found != [expected['dtype'], expected['shape']] or found[0] != dtype or dataset.ndim != dimensions:
        raise EpisodeError(f'{where} is {found[0]} {found[1]}, expected {expected["dtype"]} {expected["shape"]} '
                           f'of {dimensions} dimensions and {dtype}')
    check_storage(dataset, dataset.size * dataset.dtype.itemsize)
    array = dataset[()]
    if digest(array) != expected['blake2b']:
        raise EpisodeError(f'the checksum of {where} does not match')
    if dtype == '<f4' and not np.isfinite(array).all():
        raise EpisodeError(f'{where} holds non-finite values')
    return array


def _arrays(reference: Reference) -> dict[str, np.ndarray]:
    prefix = reference.prefix.detach().to('cpu', torch.bfloat16).contiguous()
    arrays = {'prefix': prefix.view(torch.int16).numpy().view(np.uint16), 'token_ids': reference.token_ids,
              'states': reference.states, 'key': reference.key, 'chunk': reference.chunk}
    if reference.neurons is not None:
        arrays['neurons'] = reference.neurons
    converted = {name: np.ascontiguousarray(array, DATASETS[name][0]) for name, array in arrays.items()}
    for name, array in converted.items():
        if array.ndim != DATASETS[name][1] or (array.dtype.kind == 'f' and not np.isfinite(array).all()):
            raise EpisodeError(f'{name} of {reference.id} must be finite with {DATASETS[name][1]} dimensions, found '
                               f'shape {list(array.shape)}; do not save this episode')
    return converted


def _describe(array: np.ndarray) -> dict[str, Any]:
    return {'dtype': array.dtype.str, 'shape': list(array.shape), 'blake2b': digest(array)}
