# SPDX-License-Identifier: Apache-2.0
"""The first half of a GeGLU FFN on chosen rows, without writing gate and up to memory.

    h[i] = gelu_tanh(gate @ x[index[i]]) * (up @ x[index[i]])

Weights are one [2F, D] tensor, gate rows then up rows: both are read in runs of `depth` along D, and one plain
matmul over the same tensor is the unfused path. The down projection is an ordinary matmul, left to cuBLAS.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rmuscle_kernels.numerics import await_inputs, cast, dot, gelu_tanh
from rmuscle_kernels.runtime import expect, jit, launch, multiple, numerics, tl, triton, use_triton
from rmuscle_kernels.tiles import Tile, tiles_for


@jit(do_not_specialize=['rows'])
def gather_geglu_kernel(x, index, weight, out, rows, features, x_stride, weight_stride, out_stride,
                        WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr,
                        GATHER: tl.constexpr, DESCRIPTORS: tl.constexpr, UPCAST: tl.constexpr, IEEE: tl.constexpr,
                        EARLY: tl.constexpr):
    await_inputs(EARLY)
    # neighbouring programs take the row tiles of one weight tile: weights leave DRAM once, all of x stays in L2
    row_tiles = tl.cdiv(rows, ROWS)
    first = (tl.program_id(0) // row_tiles) * COLS
    row = (tl.program_id(0) % row_tiles) * ROWS + tl.arange(0, ROWS)
    col = first + tl.arange(0, COLS)
    depth = tl.arange(0, DEPTH)
    # rows past the end read the last one again, which keeps masks out of the loop; only the store is masked
    source = tl.minimum(row, rows - 1)
    if GATHER:
        source = tl.load(index + source)
    x_block = x + source[:, None] * x_stride + depth[None, :]
    if not DESCRIPTORS:
        gate_block = weight + col[None, :] * weight_stride + depth[:, None]
        up_block = gate_block + features * weight_stride
    gate = tl.zeros((ROWS, COLS), tl.float32)
    up = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(0, WIDTH, DEPTH):
        # all loads before the products: the other order keeps more alive than 255 registers hold
        a = tl.load(x_block)
        if DESCRIPTORS:
            b = weight.load([first, start]).T
            c = weight.load([features + first, start]).T
        else:
            b = tl.load(gate_block)
            c = tl.load(up_block)
            gate_block += DEPTH
            up_block += DEPTH
        gate = dot(a, b, gate, UPCAST, IEEE)
        up = dot(a, c, up, UPCAST, IEEE)
        x_block += DEPTH
    h = cast(gelu_tanh(gate) * up, out.dtype.element_ty, UPCAST)
    tl.store(out + row[:, None] * out_stride + col[None, :], h, mask=(row < rows)[:, None])


@jit
def activate_kernel(gate_up, out, features, gate_up_stride, out_stride, COLS: tl.constexpr, UPCAST: tl.constexpr,
                    EARLY: tl.constexpr):
    await_inputs(EARLY)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    mask = col < features
    source = gate_up + tl.program_id(0) * gate_up_stride + col
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + features, mask=mask, other=0.0).to(tl.float32)
    h = cast(gelu_tanh(gate) * up, out.dtype.element_ty, UPCAST)
    tl.store(out + tl.program_id(0) * out_stride + col, h, mask=mask)


def pack_gate_up(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Join two [F, D] projections into the [2F, D] tensor that `gather_geglu` reads."""
    return torch.cat([gate, up]).contiguous()


def gather_geglu(x: torch.Tensor, weight: torch.Tensor, index: torch.Tensor | None = None, *,
                 out: torch.Tensor | None = None, tile: Tile | None = None, impl: str | None = None) -> torch.Tensor:
    """Gated activations [R, F] of the rows of x that index names, or of all rows.

    x: [rows, D]. weight: [2F, D], see `pack_gate_up`. index: int32 [R], not checked against rows (that would sync).
    The fused kernel needs D a multiple of the tile's depth and F of its cols; other sizes, fp32 and GPUs whose table
    row has no tile run a plain matmul and `activate`. Raises ValueError for shapes that do not fit, or where impl
    insists in vain.
    """
    expect('x', x, (None, None))
    width = x.shape[1]
    expect('weight', weight, (None, width), x.dtype)
    if weight.shape[0] % 2:
        raise ValueError(f'weight must hold as many gate rows as up rows, not {weight.shape[0]} rows in all; make it '
                         'with pack_gate_up')
    features = weight.shape[0] // 2
    if index is not None:
        expect('index', index, (None,), torch.int32)
    rows = x.shape[0] if index is None else index.shape[0]
    if out is not None:
        expect('out', out, (rows, features), x.dtype)
    tile = tile or tiles_for(x.device).geglu
    suits = tile and x.dtype != torch.float32 and width % tile.depth == 0 and features % tile.cols == 0
    if not use_triton(x, impl) or (impl is None and not suits):
        return activate(F.linear(x if index is None else x.index_select(0, index), weight), out=out, impl=impl)
    multiple('D, the width of x,', width, of=tile.depth)
    multiple('F, half the rows of weight,', features, of=tile.cols)
    out = x.new_empty(rows, features) if out is None else out
    if rows == 0:
        return out
    source = weight
    if tile.descriptors:
        from triton.tools.tensor_descriptor import TensorDescriptor
        source = TensorDescriptor.from_tensor(weight, [tile.cols, tile.depth])
    grid = (triton.cdiv(rows, tile.rows) * triton.cdiv(features, tile.cols),)
    gather_geglu_kernel[grid](
        x, index, source, out, rows, features, x.stride(0), weight.stride(0), out.stride(0), WIDTH=width,
        ROWS=tile.rows, COLS=tile.cols, DEPTH=tile.depth, GATHER=index is not None, DESCRIPTORS=tile.descriptors,
        **numerics(x.dtype), **tile.launch, **launch(x))
    return out


def activate(gate_up: torch.Tensor, *, out: torch.Tensor | None = None, impl: str | None = None) -> torch.Tensor:
    """gelu_tanh(gate) * up, [R, F], of the packed projection [R, 2F] that a plain matmul over the weight gives."""
    expect('gate_up', gate_up, (None, None))
    rows, features = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, features) if out is None else out
    expect('out', out, (rows, features), gate_up.dtype)
    if not use_triton(gate_up, impl):
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.mul(F.gelu(gate, approximate='tanh'), up, out=out)
    cols = min(1024, triton.next_power_of_2(features))
    activate_kernel[(rows, triton.cdiv(features, cols))](gate_up, out, features, gate_up.stride(0), out.stride(0),
                                                         COLS=cols, UPCAST=numerics(gate_up.dtype)['UPCAST'],
                                                         num_warps=4, **launch(gate_up))
    return out


def gather_geglu_reference(x: torch.Tensor, weight: torch.Tensor, index: torch.Tensor | None = None) -> torch.Tensor:
    """Torch reference of `gather_geglu`."""
    rows = x if index is None else x.index_select(0, index)
    gate, up = F.linear(rows, weight).chunk(2, dim=-1)
    return F.gelu(gate, approximate='tanh') * up
