# SPDX-License-Identifier: Apache-2.0
"""Multi-query attention over a cache of which only the first rows are valid; how many is known on the device alone.

    out[i] = softmax(q[i] . k[:kv_len] / sqrt(head_dim)) @ v[:kv_len]

All heads share their keys and every query sees every valid key, so heads are nothing but more query rows. Few rows (a
denoise step) would leave most of a GPU idle: the keys are then split over programs, and a second launch joins the parts
in a fixed order.
"""

from __future__ import annotations

import math

import torch

from rmuscle_kernels.numerics import await_inputs, cast, dot, prefetch
from rmuscle_kernels.runtime import expect, jit, launch, numerics, tl, triton, use_triton
from rmuscle_kernels.tiles import Tile, tiles_for

LOG2E = math.log2(math.e)
PROGRAMS = 128  # what fills the GPUs in the table; splitting stops there
MAX_SPLITS = 16


@jit
def attend_kernel(q, k, v, kv_len, out, partial, stats, rows, scale, k_stride, v_stride, HEAD: tl.constexpr,
                  ROWS: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr, UPCAST: tl.constexpr,
                  IEEE: tl.constexpr, EARLY: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    width = tl.arange(0, HEAD)
    valid = tl.load(kv_len)  # set long before; the keys may still be on their way to the cache, which is no harm to L2
    share = tl.cdiv(tl.cdiv(valid, KEYS), SPLITS) * KEYS
    first = split * share
    stop = tl.minimum(first + share, valid)
    if EARLY:
        ahead = tl.minimum(first + tl.arange(0, KEYS), valid - 1)[:, None]
        line = tl.arange(0, (HEAD + 63) // 64)[None, :] * 64
        prefetch(k + ahead * k_stride + line)
        prefetch(v + ahead * v_stride + line)
    await_inputs(EARLY)
    # tails read the last row again: no masks in the loop, and nothing beyond the valid rows is ever touched
    a = tl.load(q + tl.minimum(row, rows - 1)[:, None] * HEAD + width[None, :])
    best = tl.full((ROWS,), float('-inf'), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, HEAD), tl.float32)
    for start in range(first, stop, KEYS):
        key = start + tl.arange(0, KEYS)
        source = tl.minimum(key, stop - 1)
        keys = tl.load(k + source[None, :] * k_stride + width[:, None])
        score = dot(a, keys, tl.zeros((ROWS, KEYS), tl.float32), UPCAST, IEEE) * scale
        score = tl.where((key < stop)[None, :], score, float('-inf'))
        peak = tl.maximum(best, tl.max(score, axis=1))
        weight = tl.exp2(score - peak[:, None])
        shrink = tl.exp2(best - peak)
        total = total * shrink + tl.sum(weight, axis=1)
        values = tl.load(v + source[:, None] * v_stride + width[None, :])
        acc = dot(cast(weight, v.dtype.element_ty, UPCAST), values, acc * shrink[:, None], UPCAST, IEEE)
        best = peak
    inside = row < rows
    if SPLITS == 1:
        y = cast(acc / total[:, None], out.dtype.element_ty, UPCAST)
        tl.store(out + row[:, None] * HEAD + width[None, :], y, mask=inside[:, None])
    else:
        place = split * rows + row
        tl.store(stats + place, best, mask=inside)
        tl.store(stats + SPLITS * rows + place, total, mask=inside)
        # a mean of values, so 16 bits hold it as well as they hold the output; zeros from a split without keys, so that
        # joining need not know before it loads
        part = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        tl.store(partial + place[:, None] * HEAD + width[None, :], cast(part, partial.dtype.element_ty, UPCAST),
                 mask=inside[:, None])


@jit
def join_kernel(partial, stats, out, rows, HEAD: tl.constexpr, SPLITS: tl.constexpr, PADDED: tl.constexpr,
                UPCAST: tl.constexpr, EARLY: tl.constexpr):
    await_inputs(EARLY)
    row = tl.program_id(0)
    width = tl.arange(0, HEAD)
    split = tl.arange(0, PADDED)
    place = split * rows + row
    real = split < SPLITS
    part = tl.load(partial + place[:, None] * HEAD + width[None, :], mask=real[:, None], other=0.0).to(tl.float32)
    best = tl.load(stats + place, mask=real, other=float('-inf'))
    total = tl.load(stats + SPLITS * rows + place, mask=real, other=0.0)
    share = total * tl.exp2(best - tl.max(best, axis=0))  # 0 for a split without keys
    y = tl.sum(part * share[:, None], axis=0) / tl.sum(share, axis=0)
    tl.store(out + row * HEAD + width, cast(y, out.dtype.element_ty, UPCAST))


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_len: torch.Tensor, *, splits: int | None = None,
           out: torch.Tensor | None = None, tile: Tile | None = None,
           impl: str | None = None) -> torch.Tensor:
    """Attention output [R, heads * head_dim] of q [R, heads, head_dim] as `rope` returns it.

    k, v: [C, head_dim], any row stride. kv_len: int32 of one element on the device, 1 <= kv_len <= C (not checked, that
    would sync); rows from there on are never read. splits: programs that share a query row's keys, None chooses.
    fp32 runs the reference unless impl insists. Raises ValueError for shapes that do not fit or a head_dim that is no
    power of two of at least 16.
    """
    expect('q', q, (None, None, None))
    rows, heads, size = q.shape
    expect('k', k, (None, size), q.dtype)
    expect('v', v, (k.shape[0], size), q.dtype)
    expect('kv_len', kv_len, (1,), torch.int32)
    out = q.new_empty(rows, heads * size) if out is None else out
    expect('out', out, (rows, heads * size), q.dtype)
    if not (q.is_contiguous() and out.is_contiguous()):
        raise ValueError('q and out must be contiguous; q as rope returns it is')
    if not use_triton(q, impl) or (impl is None and q.dtype == torch.float32):
        return out.copy_(attend_reference(q, k, v, kv_len))
    if size < 16 or size & (size - 1):
        raise ValueError(f"head_dim must be a power of two of at least 16, not {size}; pass impl='reference'")
    tile = tile or tiles_for(q.device).attention
    queries = rows * heads
    tiles = triton.cdiv(queries, tile.rows)
    if splits is None:
        splits = max(1, min(PROGRAMS // tiles, triton.cdiv(k.shape[0], tile.depth), MAX_SPLITS))
    partial = stats = None
    if splits > 1:
        partial = q.new_empty(splits, queries, size)
        stats = torch.empty(2, splits, queries, dtype=torch.float32, device=q.device)
    attend_kernel[(tiles, splits)](q, k, v, kv_len, out, partial, stats, queries, LOG2E * size**-0.5, k.stride(0),
                                   v.stride(0), HEAD=size, ROWS=tile.rows, KEYS=tile.depth, SPLITS=splits,
                                   **numerics(q.dtype), **tile.launch, **launch(q))
    if splits > 1:
        join_kernel[(queries,)](partial, stats, out, queries, HEAD=size, SPLITS=splits,
                                PADDED=triton.next_power_of_2(splits), UPCAST=numerics(q.dtype)['UPCAST'],
                                num_warps=4, **launch(q))
    return out


def attend_reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_len: torch.Tensor) -> torch.Tensor:
    """Torch reference of `attend`, without a host sync either."""
    hidden = torch.arange(k.shape[0], device=k.device) >= kv_len
    score = q.flatten(0, 1).float() @ k.float().t() * q.shape[2]**-0.5
    weight = score.masked_fill(hidden, float('-inf')).softmax(-1)
    return (weight @ v.float().masked_fill(hidden[:, None], 0.0)).to(q.dtype).view(q.shape[0], -1)
