# SPDX-License-Identifier: Apache-2.0
"""What an exception says about the device: short of memory, which passes, or broken, which does not.

Known by text, since torch, cuBLAS, cuDNN, Triton and a Jetson's allocator have a type each, or none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rmuscle_core.errors import DeviceError, SettingsError

# In lower case. NVML's assertion is how an allocator without NVML (Jetson) fails to report that memory is out.
_NO_MEMORY = ('out of memory', 'out_of_memory', 'nvml_success == r internal assert', 'cudaerrormemoryallocation',
              'unable to allocate', 'cannot allocate memory', 'can\'t allocate memory', 'alloc_failed',
              'allocation_failed')
# After these the CUDA context answers every call with an error.
_BROKEN = ('illegal memory access', 'illegal address', 'illegal instruction', 'misaligned address',
           'device-side assert', 'launch failure', 'launch failed', 'launch timed out', 'hardware stack error',
           'invalid program counter', 'invalid address space', 'ecc error', 'uncorrectable', 'fallen off the bus',
           'gpu is lost', 'xid ', 'cuda error: unknown error', 'contained error')


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on the device or the host, under whatever name; also behind another exception."""
    return any(isinstance(e, (torch.OutOfMemoryError, MemoryError)) or _says(e, _NO_MEMORY) for e in _chain(error))


def device_failed(error: BaseException) -> bool:
    """Whether the device is lost to this process: nothing it computes from now on can be right."""
    return any(isinstance(e, DeviceError) or _says(e, _BROKEN) for e in _chain(error))


@contextmanager
def device_failures() -> Iterator[None]:
    """Raise DeviceError in place of what a lost device raises; also a decorator."""
    try:
        yield
    except Exception as error:
        if device_failed(error) and not isinstance(error, DeviceError):
            raise as_device_error(error) from error
        raise


@contextmanager
def room_for(what: str) -> Iterator[None]:
    """Raise SettingsError naming what there is no memory for, in place of what an allocator raises."""
    try:
        yield
    except Exception as error:
        if not out_of_memory(error):
            raise
        raise SettingsError(f'there is no memory for {what} ({first_line(error)}); free memory, or choose bfloat16 or '
                            'weight_dtype fp8') from error


def as_device_error(error: BaseException) -> DeviceError:
    """The refusal that stands for it, with the first line of what the driver said."""
    if isinstance(error, DeviceError):
        return error
    return DeviceError(f'the device failed and this process cannot use it any more ({first_line(error)}); '
                       'start the process again, and look for "Xid" in dmesg if it happens again')


def _says(error: BaseException, texts: tuple[str, ...]) -> bool:
    """Only what libraries raise is read: a file or a prompt named in a refusal of ours may say anything."""
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in texts)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The exception and those it was raised from or during: ending a capture that ran out of memory fails too."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def first_line(error: Exception) -> str:
    """An exception in one line; compilers print pages."""
    return f'{type(error).__name__}: {(str(error).strip().splitlines() or [""])[0]}'


def free_device_memory(device: torch.device) -> None:
    """Return what torch keeps for later to the device; whoever is short of memory may be another library."""
    if device.type == 'cuda':
        torch.cuda.empty_cache()
