# SPDX-License-Identifier: Apache-2.0
"""Can this installation run anything on this GPU? Asked once, before weights are loaded and engines chosen."""

from __future__ import annotations

import torch

from rmuscle_core.engine.faults import device_failed, first_line, out_of_memory
from rmuscle_core.errors import SettingsError
from rmuscle_kernels.merge import merge_rows

_NO_KERNELS = ('no kernel image', 'not compatible with the current pytorch', 'invalid device function',
               'the provided ptx was compiled with an unsupported toolchain', 'no device code')


def require_torch_kernels(device: torch.device | str) -> None:
    """Run one matrix product on a GPU. Raises SettingsError naming its architecture, those torch has, and the wheels.

    A device that is not here is left to whoever loads weights onto it, who refuses it by name.
    """
    try:
        device = torch.device(device)
    except RuntimeError:
        return
    if device.type != 'cuda' or (device.index or 0) >= torch.cuda.device_count():
        return
    try:
        multiply(device)
    except RuntimeError as error:
        if not any(text in str(error).lower() for text in _NO_KERNELS):
            raise
        major, minor = torch.cuda.get_device_capability(device)
        built = ', '.join(torch.cuda.get_arch_list()) or 'no GPU'
        raise SettingsError(f'torch {torch.__version__} cannot compute on {torch.cuda.get_device_name(device)}: it was '
                            f'built for {built}, this GPU is sm_{major}{minor}; install the torch wheels of '
                            f'{_wheels(major, minor)}') from error


def triton_obstacle(device: torch.device) -> str:
    """Why Triton kernels do not run on a GPU, as the end of a sentence that says what to do; empty if they do."""
    try:
        launch_kernel(device)
    except Exception as error:
        if out_of_memory(error) or device_failed(error):
            raise
        return f'Triton kernels do not run here ({first_line(error)}); {remedy(error)}'
    return ''


def multiply(device: torch.device) -> None:
    """A matrix product, waited for."""
    ones = torch.ones(16, 16, device=device)
    (ones @ ones).sum().item()


def launch_kernel(device: torch.device) -> None:
    """The smallest of the project's kernels on one row, waited for."""
    row = torch.ones(1, 16, device=device)
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    merge_rows(None, row, zero, row[None]).sum().item()


def remedy(error: Exception) -> str:
    """What to do about a kernel that did not compile or start."""
    text = f'{type(error).__name__} {error}'.lower()
    if 'compiler' in text or 'python.h' in text:
        return 'install a C compiler and the headers of this Python (gcc, python3-dev)'
    if 'ptxas' in text:
        return ('set TRITON_PTXAS_PATH, and TRITON_PTXAS_BLACKWELL_PATH on a Blackwell GPU such as Jetson Thor, to the '
                'ptxas of a CUDA toolkit that knows this GPU, for example /usr/local/cuda/bin/ptxas')
    return 'check that the versions of torch, triton and the driver belong together'


def _wheels(major: int, minor: int) -> str:
    """The first CUDA version whose wheels know an architecture."""
    if (major, minor) >= (11, 0) and (major, minor) not in ((12, 0),):
        return 'CUDA 13 (cu130)'
    return 'CUDA 12.8 or newer (cu128)' if major >= 10 else 'a CUDA version that still supports it (cu126)'
