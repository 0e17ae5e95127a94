# SPDX-License-Identifier: Apache-2.0
"""What an exception of the device means, by the texts that libraries really raise."""

import pytest
import torch

from rmuscle_core.engine.faults import device_failed, device_failures, out_of_memory
from rmuscle_core.errors import DeviceError, EpisodeError

NO_MEMORY = [
    torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 20.00 MiB'),
    RuntimeError('NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/opt/pytorch/c10/cuda/CUDACachingAllocator.cpp":1128'),
    RuntimeError('CUDA error: out of memory'),
    RuntimeError('cudaErrorMemoryAllocation: the API call failed because it was unable to allocate enough memory'),
    RuntimeError('[enforce fail at alloc_cpu.cpp:127] data. DefaultCPUAllocator: can\'t allocate memory'),
    RuntimeError('CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`'),
    RuntimeError('cuDNN error: CUDNN_STATUS_ALLOC_FAILED'),
    RuntimeError('Triton Error [CUDA]: out of memory'),
    MemoryError('Unable to allocate 3.00 GiB for an array')]
BROKEN = [
    RuntimeError('CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be reported'),
    RuntimeError('CUDA error: device-side assert triggered'),
    RuntimeError('CUDA error: unspecified launch failure'),
    RuntimeError('Triton Error [CUDA]: an illegal memory access was encountered'),
    RuntimeError('CUDA error: uncorrectable ECC error encountered'),
    RuntimeError('Unable to determine the device handle: GPU has fallen off the bus'),
    RuntimeError('CUDA error: misaligned address')]
NEITHER = [RuntimeError('mat1 and mat2 shapes cannot be multiplied'), ValueError('out of memory'),
           EpisodeError('episode launch failure.h5 is unusable: out of memory'), KeyError('ecc error'),
           RuntimeError('out of resource: shared memory, Required: 264192, Hardware limit: 232448')]


@pytest.mark.parametrize('error', NO_MEMORY, ids=str)
def test_v31_memory_that_ran_out_is_known_under_every_name(error):
    assert out_of_memory(error) and not device_failed(error)


@pytest.mark.parametrize('error', BROKEN, ids=str)
def test_a_lost_device_is_known_and_becomes_an_error_of_its_own(error):
    assert device_failed(error) and not out_of_memory(error)
    with pytest.raises(DeviceError, match='start the process again') as raised, device_failures():
        raise error
    assert '\n' not in str(raised.value) and raised.value.__cause__ is error
    with pytest.raises(DeviceError) as again, device_failures():
        raise raised.value
    assert again.value is raised.value


@pytest.mark.parametrize('error', NEITHER, ids=str)
def test_other_errors_are_neither(error):
    assert not out_of_memory(error) and not device_failed(error)
    with pytest.raises(type(error)), device_failures():
        raise error


def test_what_an_exception_was_raised_from_counts_too():
    try:
        try:
            raise torch.OutOfMemoryError('CUDA out of memory')
        finally:
            raise RuntimeError('operation would result in a merge of two independent capture sequences')
    except RuntimeError as error:
        assert out_of_memory(error)
