# SPDX-License-Identifier: Apache-2.0
"""How much memory a device has left, and giving back what is no longer used."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress
from pathlib import Path

import torch

MEMINFO = Path('/proc/meminfo')


def available_bytes(device: torch.device) -> int:
    """Memory that can still be allocated on a device; of the host for a CPU.

    A GPU that shares the host's memory (Jetson) counts file cache as used though it is given up on demand, so the
    kernel's own estimate is taken there.
    """
    if device.type == 'cuda' and not is_integrated(device):
        return torch.cuda.mem_get_info(device)[0]
    lines = MEMINFO.read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith('MemAvailable'))


def is_integrated(device: torch.device) -> bool:
    """Whether a CUDA device has no memory of its own."""
    return bool(getattr(torch.cuda.get_device_properties(device), 'is_integrated', False))


def give_memory_back() -> None:
    """Return what is no longer used to the device and to the system.

    Weights that are loaded and freed leave holes in the C library's heap, which a long-lived process would keep.
    """
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    with suppress(OSError, AttributeError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)
