# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding straight off a packed multi-query qkv projection.

Each head is split in halves (a, b) and rotated by its row's angles: (a cos - b sin, b cos + a sin). v is copied. With
one key-value head, attention is one product over rows * heads queries: q comes out as [rows, heads, head_dim], whose
flat view is that product's input and whose attention output is the input of the output projection, no transpose.
"""

from __future__ import annotations

import torch

from rmuscle_kernels.numerics import await_inputs, cast
from rmuscle_kernels.runtime import INTERPRETED, expect, jit, launch, multiple, tl, triton, use_triton


@jit
def rope_kernel(qkv, cos, sin, q, k, v, heads, half, qkv_stride, table_stride, q_stride, k_stride, v_stride,
                HEADS: tl.constexpr, HALF: tl.constexpr, UPCAST: tl.constexpr, EARLY: tl.constexpr):
    await_inputs(EARLY)
    row = tl.program_id(0)
    head = tl.arange(0, HEADS)[:, None]  # the query heads, then k, then v
    col = tl.arange(0, HALF)[None, :]
    inside = col < half
    mask = (head < heads + 2) & inside
    turned = (head <= heads) & inside
    source = qkv + row * qkv_stride + head * (2 * half) + col
    a = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + half, mask=mask, other=0.0).to(tl.float32)
    angle = row * table_stride + col
    c = tl.load(cos + angle, mask=inside, other=0.0)
    s = tl.load(sin + angle, mask=inside, other=0.0)
    first = cast(tl.where(turned, a * c - b * s, a), q.dtype.element_ty, UPCAST)
    second = cast(tl.where(turned, b * c + a * s, b), q.dtype.element_ty, UPCAST)
    target = q + row * q_stride + head * (2 * half) + col
    tl.store(target, first, mask=(head < heads) & inside)
    tl.store(target + half, second, mask=(head < heads) & inside)
    target = k + row * k_stride + col + head * 0
    tl.store(target, first, mask=(head == heads) & inside)
    tl.store(target + half, second, mask=(head == heads) & inside)
    target = v + row * v_stride + col + head * 0
    tl.store(target, first, mask=(head == heads + 1) & inside)
    tl.store(target + half, second, mask=(head == heads + 1) & inside)


def rope(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int, *,
         cache: tuple[torch.Tensor, torch.Tensor] | None = None, offset: int = 0,
         impl: str | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotate q and k of a packed projection; optionally write k and v into a cache.

    qkv: [R, (heads + 2) * head_dim]. cos, sin: fp32 [R, head_dim / 2], row i the angles of row i's position.
    cache: (k, v), each [rows, head_dim]; rows offset .. offset + R are written and returned as views.
    Returns q [R, heads, head_dim], k [R, head_dim], v [R, head_dim]. Raises ValueError for shapes that do not fit.
    """
    expect('qkv', qkv, (None, None))
    rows, width = qkv.shape
    multiple(f'the width of qkv with {heads} query heads', width, of=2 * (heads + 2))
    size = width // (heads + 2)
    expect('cos', cos, (rows, size // 2), torch.float32)
    expect('sin', sin, (rows, size // 2), torch.float32)
    if cache is None:
        k, v = qkv.new_empty(rows, size), qkv.new_empty(rows, size)
    else:
        for name, tensor in zip(('the k cache', 'the v cache'), cache):
            expect(name, tensor, (None, size), qkv.dtype)
            if not 0 <= offset <= tensor.shape[0] - rows:
                raise ValueError(f'{name} has {tensor.shape[0]} rows and cannot take {rows} at row {offset}')
        k, v = (tensor[offset:offset + rows] for tensor in cache)
    if not use_triton(qkv, impl):
        q, new_k, new_v = rope_reference(qkv, cos, sin, heads)
        return q, k.copy_(new_k), v.copy_(new_v)
    q = qkv.new_empty(rows, heads, size)
    rope_kernel[(rows,)](qkv, cos, sin, q, k, v, heads, size // 2, qkv.stride(0), cos.stride(0), q.stride(0),
                         k.stride(0), v.stride(0), HEADS=triton.next_power_of_2(heads + 2),
                         HALF=triton.next_power_of_2(size // 2), UPCAST=INTERPRETED, num_warps=4, **launch(qkv))
    return q, k, v


def rope_reference(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
                   heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Torch reference of `rope`, without the cache."""
    heads_first = qkv.unflatten(1, (heads + 2, -1))
    a, b = heads_first[:, :heads + 1].float().chunk(2, dim=-1)
    c, s = cos[:, None], sin[:, None]
    turned = torch.cat([a * c - b * s, b * c + a * s], dim=-1).to(qkv.dtype)
    return turned[:, :heads].contiguous(), turned[:, heads], heads_first[:, heads + 1]
