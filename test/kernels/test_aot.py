# SPDX-License-Identifier: Apache-2.0
"""Every kernel compiles for every architecture of the tile table, without spills and onto tensor cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from rmuscle_kernels.tiles import TABLE

pytest.importorskip('triton')


@pytest.mark.parametrize('capability', TABLE)
def test_kernels_fit(capability):
    # a process of its own: the interpreter of the other tests replaces what the compiler needs
    environment = {name: value for name, value in os.environ.items() if name != 'TRITON_INTERPRET'}
    done = subprocess.run([sys.executable, '-m', 'rmuscle_kernels.aot', str(capability)], env=environment,
                          capture_output=True, text=True, timeout=300)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert rows, done.stderr[-2000:]
    if 'skipped' in rows[0]:
        pytest.skip(rows[0]['skipped'])
    assert done.returncode in (0, 1), done.stderr[-2000:]
    assert {row['kernel']: row['problems'] for row in rows if row['problems']} == {}
    fused = {'gather_geglu'} if TABLE[capability].geglu else set()  # elsewhere cuBLAS does it
    assert {'activate', 'neuron_down', 'choose', *fused} <= {row['kernel'] for row in rows}
