# SPDX-License-Identifier: Apache-2.0
"""Put recomputed and remembered FFN outputs back in order, onto the residual stream where one is given, in one pass.

    out[i] = residual[i] + (rows[inverse[i]] if inverse[i] >= 0 else reference_y[-1 - inverse[i], i])
"""

from __future__ import annotations

import torch

from rmuscle_kernels.numerics import await_inputs, cast
from rmuscle_kernels.runtime import INTERPRETED, expect, jit, launch, tl, triton, use_triton


@jit
def merge_kernel(residual, rows, inverse, reference_y, out, width, residual_stride, rows_stride, slot_stride,
                 reference_stride, out_stride, WIDTH: tl.constexpr, ADD: tl.constexpr, UPCAST: tl.constexpr,
                 EARLY: tl.constexpr):
    await_inputs(EARLY)
    row = tl.program_id(0)
    position = tl.load(inverse + row)
    if position >= 0:
        source = rows + position * rows_stride
    else:
        source = reference_y + ((-1 - position).to(tl.int64) * slot_stride + row * reference_stride)
    for start in range(0, width, WIDTH):
        col = start + tl.arange(0, WIDTH)
        mask = col < width
        total = tl.load(source + col, mask=mask, other=0.0).to(tl.float32)
        if ADD:
            total += tl.load(residual + row * residual_stride + col, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + row * out_stride + col, cast(total, out.dtype.element_ty, UPCAST), mask=mask)


def merge_rows(residual: torch.Tensor | None, rows: torch.Tensor, inverse: torch.Tensor, reference_y: torch.Tensor,
               out: torch.Tensor | None = None, *, impl: str | None = None) -> torch.Tensor:
    """Add each row's FFN output, recomputed or remembered, to the residual stream.

    residual: [T + n_text, D], or None for the FFN outputs alone. rows: [R, D] recomputed outputs. inverse: int32
    [T + n_text] of `select_tokens`: position in rows, or -1 - slot; text rows are always in rows. reference_y:
    [slots, T, D].
    out may be residual. Raises ValueError for shapes that do not fit.
    """
    expect('rows', rows, (None, None))
    expect('inverse', inverse, (None,), torch.int32)
    length, width = inverse.shape[0], rows.shape[1]
    if residual is not None:
        expect('residual', residual, (length, width), rows.dtype)
    expect('reference_y', reference_y, (None, None, width), rows.dtype)
    out = rows.new_empty(length, width) if out is None else out
    expect('out', out, (length, width), rows.dtype)
    if not use_triton(rows, impl):
        return out.copy_(merge_rows_reference(residual, rows, inverse, reference_y))
    merge_kernel[(length,)](residual, rows, inverse, reference_y, out, width,
                            0 if residual is None else residual.stride(0), rows.stride(0), reference_y.stride(0),
                            reference_y.stride(1), out.stride(0), WIDTH=min(2048, triton.next_power_of_2(width)),
                            ADD=residual is not None, UPCAST=INTERPRETED, num_warps=4, **launch(rows))
    return out


def merge_rows_reference(residual: torch.Tensor | None, rows: torch.Tensor, inverse: torch.Tensor,
                         reference_y: torch.Tensor) -> torch.Tensor:
    """Torch reference of `merge_rows`."""
    delta = rows.new_zeros(inverse.shape[0], rows.shape[1])
    tokens = reference_y.shape[1]
    row = torch.arange(tokens, device=rows.device)
    delta[:tokens] = reference_y[(-1 - inverse[:tokens]).clamp(min=0).long(), row]
    if rows.shape[0]:
        recomputed = rows.index_select(0, inverse.clamp(min=0))
        delta = torch.where((inverse >= 0)[:, None], recomputed, delta)
    return delta if residual is None else residual + delta
