# SPDX-License-Identifier: Apache-2.0
"""Whatever the small files of a checkpoint hold: it works, or it is refused in one sentence, never a traceback."""

from __future__ import annotations

import copy
import json
import shutil

import pytest
import yaml
from parity_copies import PARITY, as_openpi, copy_of

from rmuscle_core.errors import CheckpointError
from rmuscle_core.model import load_config
from rmuscle_core.processing.processor import read_recipe

WRONG = (None, [], {}, 'x', -1, 0, 1.5, True, [None], {'x': None}, [[1]], 10**6)
LEROBOT = ('config.json', 'policy_preprocessor.json', 'policy_postprocessor.json')
OPENPI = ('config.json', 'rmuscle.yaml', 'assets/lab/robot/norm_stats.json')


def places(content, path=()):
    """Every position in a nested value but the root."""
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        yield (*path, key)
        if len(path) < 5 and not (isinstance(value, list) and len(value) > 4):
            yield from places(value, (*path, key))


def changed(content, path, value):
    content = copy.deepcopy(content)
    holder = content
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return content


def read(directory):
    read_recipe(directory, load_config(directory)).report()


@pytest.fixture(scope='module', params=['lerobot', 'openpi'])
def directory(request, tmp_path_factory):
    made = copy_of('tiny_pi05_float32', tmp_path_factory.mktemp(request.param))
    return as_openpi(made, 'pi05') if request.param == 'openpi' else made


def test_a_wrong_value_anywhere_is_no_crash(directory):
    refused, accepted, crashes = 0, 0, set()
    for name in OPENPI if (directory / 'assets').exists() else LEROBOT:
        path = directory / name
        original = path.read_text()
        load, dump = (yaml.safe_load, yaml.safe_dump) if path.suffix == '.yaml' else (json.loads, json.dumps)
        content = load(original)
        if name == 'config.json':
            content |= {'architectures': ['Pi05'], 'model_type': 'pi05'}
        for step in content.get('steps', []):
            if 'rename_map' in step['config']:
                step['config']['rename_map'] = {'observation.images.top': 'observation.images.base_0_rgb'}
        for place in places(content):
            for value in WRONG:
                path.write_text(dump(changed(content, place, value)))
                try:
                    read(directory)
                    accepted += 1
                except CheckpointError as error:
                    assert len(str(error).splitlines()) == 1
                    refused += 1
                except Exception as error:  # noqa: BLE001 - the point of the test
                    crashes.add(f'{name} with {place} = {value!r}: {type(error).__name__}: {error}')
        path.write_text(original)
        read(directory)
    assert not crashes
    assert refused > 100 and accepted > 20


def test_cut_files_are_refused(tmp_path):
    whole = PARITY / 'tiny_pi05_float32'
    for path in whole.iterdir():
        if path.suffix == '.npz' or path.name == 'tiny_meta.json':
            continue
        directory = tmp_path / path.name
        shutil.copytree(whole, directory)
        for size in (0, 7, path.stat().st_size // 2):
            (directory / path.name).write_bytes(path.read_bytes()[:size])
            with pytest.raises(CheckpointError, match=path.name.split('.')[0]):
                read(directory)
