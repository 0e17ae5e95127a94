# SPDX-License-Identifier: Apache-2.0
"""Kernel tests run on a GPU or, where there is none, in Triton's interpreter (test/conftest.py asks for it)."""

from __future__ import annotations

import pytest
import torch

from rmuscle_kernels import runtime

DEVICE = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
RUNNABLE = runtime.triton is not None and (DEVICE.type == 'cuda' or runtime.INTERPRETED)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a kernel to run, saying why, where neither a GPU nor the interpreter is there."""
    reason = 'triton is missing' if runtime.triton is None else 'triton was imported before TRITON_INTERPRET was set'
    for item in items:
        if not RUNNABLE and 'device' in getattr(item, 'fixturenames', ()):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def device() -> torch.device:
    """Where the kernels under test run."""
    return DEVICE


@pytest.fixture
def random(device):
    """Return normal(shape, scale, dtype): reproducible tensors on the device."""
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype).to(device)
    return normal


@pytest.fixture
def slot(device) -> torch.Tensor:
    """The second of the reference slots."""
    return torch.tensor([1], dtype=torch.int32, device=device)
