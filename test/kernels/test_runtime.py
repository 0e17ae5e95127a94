# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from rmuscle_kernels.tiles import TABLE, capability_tiles

WITHOUT_TRITON = """
import sys
sys.modules['triton'] = None  # makes `import triton` raise ImportError
import torch
from rmuscle_kernels import fp8, geglu, merge, neurons, norms, rope, select, tiles
x = torch.ones(2, 4)
assert geglu.gather_geglu(x, torch.ones(6, 4)).shape == (2, 3)
try:
    norms.rms_norm(x, torch.ones(4), impl='triton')
except ValueError as refusal:
    print(refusal)
"""


def test_without_triton_the_references_run_and_the_kernels_are_refused():
    done = subprocess.run([sys.executable, '-c', WITHOUT_TRITON], capture_output=True, text=True)
    assert "impl='triton' needs Triton" in done.stdout, done.stderr[-2000:]


@pytest.mark.parametrize('capability, row', [(75, 87), (86, 87), (89, 89), (103, 100), (121, 120)])
def test_an_unlisted_gpu_takes_the_nearest_row_below(capability, row):
    assert capability_tiles(capability) is TABLE[row]


def test_cpu_tensors_run_the_reference_unless_told_otherwise():
    from rmuscle_kernels.runtime import use_triton
    assert not use_triton(torch.zeros(1), None)
