# SPDX-License-Identifier: Apache-2.0
"""Loading takes the weights' memory and little more; a file that was mapped would take it twice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rmuscle_core.errors import CheckpointError
from rmuscle_core.model import checkpoint, load_model

SCRIPT = Path(__file__).parents[3] / 'bench' / 'load_real_size.py'


def test_i14_weights_are_streamed_to_their_place(tmp_path):
    made = subprocess.run([sys.executable, SCRIPT, '--size', 'part', '--folder', tmp_path], check=True,
                          stdout=subprocess.PIPE, text=True)
    found = json.loads(made.stdout)
    assert 0.3 < found['file_gb'] < 0.5
    for run in ('from_disk', 'from_page_cache'):
        loaded = found[run]
        assert loaded['weights_gb'] > 0.25
        # what torch imports at first use, and a block; a mapped file would add its whole size
        assert loaded['beyond_weights_gb'] - loaded['of_it_imports_gb'] < 0.3
    assert not list(tmp_path.iterdir())


def test_i14_weights_that_do_not_fit_are_refused_before_any_is_read(monkeypatch, parity):
    monkeypatch.setattr(checkpoint, 'available_bytes', lambda device: 1000)
    monkeypatch.setattr(checkpoint, '_read_weights', lambda *_: pytest.fail('weights were read'))
    with pytest.raises(CheckpointError, match=r'need 0\.0 GB as float32 but cpu has 0\.0 GB free'):
        load_model(parity / 'tiny_pi05_float32')
