# SPDX-License-Identifier: Apache-2.0
"""Where a call runs: the Triton kernel on CUDA tensors, its torch reference on everything else.

Triton is optional: without it these modules import and every function runs its reference, also on CUDA tensors.
"""

from __future__ import annotations

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU-only hosts and some aarch64 images come without it
    triton = tl = None

# decided once by Triton, when its decorator meets the first kernel
INTERPRETED = triton is not None and bool(triton.knobs.runtime.interpret)
# 3.10 turns the contraction a*b+c -> fma off unless asked for
LAUNCH = {'enable_fp_fusion': True}
# Whether a kernel may be launched while the one before it still runs, and wait on the device (programmatic dependent
# launch, Hopper and later); read at each launch
EARLY_LAUNCH = False
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def jit(function=None, **options):
    """``triton.jit``, or the plain function where Triton is missing (it is then never launched).

    Arguments that change while the robot runs (row counts, k, n) belong in do_not_specialize: otherwise 1 and multiples
    of 16 are each compiled anew, in the middle of a call.
    """
    if triton is None:
        return (lambda kernel: kernel) if function is None else function
    return triton.jit(function, **options)


def use_triton(x: torch.Tensor, impl: str | None) -> bool:
    """Whether this call launches a Triton kernel.

    impl: None chooses by device; 'triton' and 'reference' insist. 'triton' on CPU tensors needs TRITON_INTERPRET=1
    in the environment before Triton is imported.
    """
    if impl not in (None, 'triton', 'reference'):
        raise ValueError(f"impl must be None, 'triton' or 'reference', not {impl!r}")
    if impl == 'triton' and (triton is None or not (x.is_cuda or INTERPRETED)):
        raise ValueError(f"impl='triton' needs Triton and a CUDA tensor, or TRITON_INTERPRET=1; this tensor is on "
                         f'{x.device}, so leave impl unset to run the torch reference')
    return impl == 'triton' or (impl is None and triton is not None and x.is_cuda)


def launch(x: torch.Tensor) -> dict[str, bool]:
    """Return the options of a launch on x's device, and the constexpr that `numerics.await_inputs` takes."""
    early = EARLY_LAUNCH and x.is_cuda and torch.cuda.get_device_capability(x.device)[0] >= 9
    return {**LAUNCH, 'EARLY': early, **({'launch_pdl': True} if early else {})}


def numerics(dtype: torch.dtype) -> dict[str, bool]:
    """Return the constexprs that `numerics.dot` and `numerics.cast` take for tensors of this dtype."""
    return {'UPCAST': INTERPRETED, 'IEEE': dtype == torch.float32}


def expect(name: str, tensor: torch.Tensor, shape: tuple[int | None, ...], *dtypes: torch.dtype) -> None:
    """Raise ValueError unless the tensor has this shape (None: any size), dtype and a contiguous last dimension."""
    fits = tensor.dim() == len(shape) and all(want in (None, have) for want, have in zip(shape, tensor.shape))
    if not fits:
        wanted = ', '.join('any' if size is None else str(size) for size in shape)
        raise ValueError(f'{name} must have shape [{wanted}], not {list(tensor.shape)}')
    if tensor.dtype not in (dtypes or DTYPES):
        allowed = ', '.join(str(dtype).removeprefix('torch.') for dtype in dtypes or DTYPES)
        raise ValueError(f'{name} must be {allowed}, not {str(tensor.dtype).removeprefix("torch.")}; convert it first')
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f'{name} must be contiguous in its last dimension, its strides are {list(tensor.stride())}; '
                         'call .contiguous() once when it is made')


def multiple(name: str, size: int, of: int) -> None:
    """Raise ValueError unless size is a multiple of what the tile needs."""
    if size % of:
        raise ValueError(f"{name} must be a multiple of {of} for this tile, not {size}; pass impl='reference' or "
                         'another tile')
