# SPDX-License-Identifier: Apache-2.0
"""A short seeded run of the library's fuzz targets; ``bench/fuzz`` is for long ones."""

import importlib.util
import random
from pathlib import Path

import pytest

SPEC = importlib.util.spec_from_file_location('fuzz_library', Path(__file__).parents[3] / 'bench/fuzz/library.py')
fuzz = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(fuzz)


@pytest.mark.parametrize('name', fuzz.targets())
def test_whatever_the_file_holds_it_is_refused_in_one_sentence(tmp_path, name):
    for seed in range(15):
        folder = tmp_path / str(seed)
        folder.mkdir()
        try:
            fuzz.targets()[name](random.Random(seed), folder)
        except BaseException as error:
            raise AssertionError(f'{name}, seed {seed}') from error
