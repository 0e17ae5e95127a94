# SPDX-License-Identifier: Apache-2.0
"""A short run over all targets of bench/fuzz, and what its harness makes of bad ones."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

from rmuscle_core.errors import LibraryError

FOLDER = Path(__file__).parents[1] / 'bench/fuzz'


def test_hostile_input_of_every_kind_is_used_rightly_or_refused_in_one_sentence():
    ran = subprocess.run([sys.executable, FOLDER, '--inputs', '180', '--seed', '7', '--json'], capture_output=True,
                         text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    outcomes = json.loads(ran.stdout)
    assert len(outcomes) > 10 and sum(o['refused'] for o in outcomes.values()) > 60


def test_a_target_that_fails_is_counted(tmp_path):
    spec = importlib.util.spec_from_file_location('fuzz_main', FOLDER / '__main__.py')
    fuzz = importlib.util.module_from_spec(spec)
    sys.modules['fuzz_main'] = fuzz  # where dataclasses look their annotations up
    spec.loader.exec_module(fuzz)

    def talks(rng):
        LibraryError(' ')
    outcomes = fuzz.run({'raises': lambda rng: 1 / 0, 'talks': talks, 'good': lambda rng, folder: None}, 7, seed=0)
    assert {name: (o.inputs, o.refused, o.unhandled, o.not_one_sentence, o.good) for name, o in outcomes.items()} == {
        'raises': (3, 0, 3, 0, False), 'talks': (2, 2, 0, 2, False), 'good': (2, 0, 0, 0, True)}


def test_a_refusal_is_one_line_of_bearable_length_whatever_it_quotes():
    assert str(LibraryError('a file\nof\r\n a name')) == 'a file of a name'
    text = str(LibraryError('expected one, not ' + 'x' * 10**6 + '; choose one'))
    assert len(text) < 2000 and text.startswith('expected one, not xx') and text.endswith('xx; choose one')
