# SPDX-License-Identifier: Apache-2.0
"""A layer of the action expert in few launches: norms, rotation, gates and residual adds are folded into the products.

    q, k, v = rope(product(norm(x)))    attend    x += gate * out-projection    x += gate * FFN(norm(x))

With rows this few a launch costs as much as its work. Two identities make room: dividing a row by its RMS commutes with
the product that follows, and the shift of an adaptive norm, times that product's weight, is a constant of the denoise
step (``offset``). So whoever writes the stream also writes it scaled for the next norm, and the sums of its squares.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from rmuscle_kernels.neurons import EPS, NeuronWorkspace, launch_down, launch_gate_up, neuron_ffn_reference
from rmuscle_kernels.numerics import await_inputs, cast, dot, load_squares, paired, prefetch, row_scale
from rmuscle_kernels.rope import rope_reference
from rmuscle_kernels.runtime import expect, jit, launch, numerics, tl, triton, use_triton
from rmuscle_kernels.tiles import Tile, Tiles, tiles_for


@dataclass(frozen=True)
class Stream:
    """The residual stream before an adaptive RMS norm.

    x: [H, W]. scaled: x * (1 + the norm's scale), same dtype. squares: fp32 [parts, H], sums of x^2 over equal parts of
    the columns, a power of two of them.
    """

    x: torch.Tensor
    scaled: torch.Tensor
    squares: torch.Tensor


def make_stream(x: torch.Tensor, scale: torch.Tensor) -> Stream:
    """The stream x [H, W] before a norm with this scale, fp32 [W]."""
    value = x.float()
    return Stream(x, (value * (1.0 + scale)).to(x.dtype), value.square().sum(-1)[None])


@jit
def qkv_kernel(x, squares, offset, weight, cos, sin, q, k, v, rows, heads, eps, k_stride, v_stride,
               WIDTH: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr,
               PARTS: tl.constexpr, UPCAST: tl.constexpr, IEEE: tl.constexpr, EARLY: tl.constexpr):
    # a program holds the same columns of both halves of a head, which are what a rotation mixes
    head = tl.program_id(0) // (HALF // COLS)
    first = (tl.program_id(0) % (HALF // COLS)) * COLS
    pair = tl.arange(0, 2 * COLS)
    feature = head * (2 * HALF) + first + pair // 2 + (pair % 2) * HALF
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None]
    depth = tl.arange(0, DEPTH)
    added = tl.load(offset + feature)
    if EARLY:
        for start in tl.static_range(0, WIDTH, DEPTH):
            prefetch(weight + feature[None, :] * WIDTH + (start + tl.arange(0, DEPTH // 64) * 64)[:, None])
    await_inputs(EARLY)
    weight_block = weight + feature[None, :] * WIDTH + depth[:, None]
    x_block = x + row[:, None] * WIDTH + depth[None, :]
    sums = load_squares(squares, row, rows, PARTS)
    acc = tl.zeros((ROWS, 2 * COLS), tl.float32)
    for _ in range(0, WIDTH, DEPTH):
        a = tl.load(x_block, mask=inside, other=0.0)
        b = tl.load(weight_block)
        acc = dot(a, b, acc, UPCAST, IEEE)
        x_block += DEPTH
        weight_block += DEPTH
    acc = acc * row_scale(sums, eps, WIDTH) + added[None, :]
    left, right = paired(acc, ROWS, COLS)
    col = first + tl.arange(0, COLS)
    if head <= heads:  # queries and the key turn, the value does not
        angle = row[:, None] * HALF + col[None, :]
        c = tl.load(cos + angle, mask=inside, other=0.0)
        s = tl.load(sin + angle, mask=inside, other=0.0)
        turned = left * c - right * s
        right = right * c + left * s
        left = turned
    if head < heads:
        target = q + head * (2 * HALF)
        stride = heads * (2 * HALF)
    elif head == heads:
        target = k
        stride = k_stride
    else:
        target = v
        stride = v_stride
    target_block = target + row[:, None] * stride + col[None, :]
    tl.store(target_block, cast(left, q.dtype.element_ty, UPCAST), mask=inside)
    tl.store(target_block + HALF, cast(right, q.dtype.element_ty, UPCAST), mask=inside)


def norm_qkv_rope(stream: Stream, offset: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
                  heads: int, k: torch.Tensor, v: torch.Tensor, *, tiles: Tiles | None = None,
                  impl: str | None = None) -> torch.Tensor:
    """Rotated queries [H, heads, head_dim] of the normed stream; rotated keys and the values go to rows 0.. of k, v.

    offset: fp32 [(heads + 2) * head_dim], shift @ weight^T. weight: [(heads + 2) * head_dim, W], contiguous. cos, sin:
    fp32 [H, head_dim / 2], contiguous. k, v: [>= H, head_dim]. fp32 and sizes that the tile does not divide run the
    reference. Raises ValueError for misfits.
    """
    x = stream.scaled
    rows, width = x.shape
    size = weight.shape[0] // (heads + 2)
    for name, tensor, shape in (('the stream', x, (rows, width)), ('weight', weight, ((heads + 2) * size, width))):
        expect(name, tensor, shape, x.dtype)
        if not tensor.is_contiguous():
            raise ValueError(f'{name} must be contiguous; call .contiguous() once when it is made')
    expect('offset', offset, (weight.shape[0],), torch.float32)
    tile = (tiles or tiles_for(x.device)).qkv
    suits = x.dtype != torch.float32 and width % tile.depth == 0 and (size // 2) % tile.cols == 0
    if not use_triton(x, impl) or (impl is None and not suits):
        packed = F.linear(_normed(stream), weight).float() + offset
        q, new_k, new_v = rope_reference(packed.to(x.dtype), cos, sin, heads)
        k[:rows], v[:rows] = new_k, new_v
        return q
    q = x.new_empty(rows, heads, size)
    qkv_kernel[((heads + 2) * (size // 2 // tile.cols), triton.cdiv(rows, tile.rows))](
        x, stream.squares, offset, weight, cos, sin, q, k, v, rows, heads, EPS, k.stride(0), v.stride(0), WIDTH=width,
        HALF=size // 2, ROWS=tile.rows, COLS=tile.cols, DEPTH=tile.depth, PARTS=stream.squares.shape[0],
        **numerics(x.dtype), **tile.launch, **launch(x))
    return q


def add_project(stream: Stream, y: torch.Tensor, weight_t: torch.Tensor, gate: torch.Tensor, scale: torch.Tensor,
                workspace: NeuronWorkspace, *, tiles: Tiles | None = None, impl: str | None = None) -> Stream:
    """The stream after x + gate * (y @ weight_t), before a norm with ``scale``.

    y: [rows, n] with rows padded to the down tile, of which the first H count. weight_t: [n, W], contiguous.
    gate, scale: fp32 [W].
    """
    x = stream.x
    rows, width = x.shape
    expect('y', y, (None, weight_t.shape[0]), x.dtype)
    expect('weight_t', weight_t, (None, width), x.dtype)
    tiles = tiles or tiles_for(x.device)
    if not _launches(x, tiles, impl):
        return make_stream((x.float() + (y[:rows] @ weight_t).float() * gate).to(x.dtype), scale)
    out = tiles.out
    if y.shape[0] < -(-rows // out.rows) * out.rows or y.shape[1] % out.depth:
        raise ValueError(f'y must have rows padded to {out.rows} and columns in whole {out.depth}, not '
                         f'{list(y.shape)}')
    following = _empty_stream(x, out)
    launch_down(y, weight_t, None, None, weight_t.shape[0], None, workspace, following.x, out,
                (x, gate, scale, following.scaled, following.squares))
    return following


def add_neuron_ffn(stream: Stream, gate_up: torch.Tensor, down_t: torch.Tensor, offset: torch.Tensor,
                   gate: torch.Tensor, scale: torch.Tensor, workspace: NeuronWorkspace,
                   neurons: torch.Tensor | None = None, slot: torch.Tensor | None = None, n: int | None = None,
                   residual: torch.Tensor | None = None, *, tiles: Tiles | None = None,
                   impl: str | None = None) -> Stream:
    """The stream after x + gate * FFN(norm(x)), before a norm with ``scale``.

    offset: fp32 [N, 2], shift @ gate_up^T. gate, scale: fp32 [W]. The rest is as in `neuron_ffn`.
    """
    x = stream.x
    expect('offset', offset, (gate_up.shape[0], 2), torch.float32)
    n = (gate_up.shape[0] if neurons is None else neurons.shape[1]) if n is None else n
    tiles = tiles or tiles_for(x.device)
    if n == 0 or not _launches(x, tiles, impl):
        y = neuron_ffn_reference(_normed(stream), gate_up, down_t, neurons, slot, n, residual, offset, workspace)
        return make_stream((x.float() + y.float() * gate).to(x.dtype), scale)
    workspace.check(*x.shape, n, tiles)
    launch_gate_up(stream.scaled, stream.squares, offset, gate_up, neurons, slot, n, workspace.hidden, tiles)
    following = _empty_stream(x, tiles.neuron_down)
    launch_down(workspace.hidden, down_t, neurons, slot, n, residual, workspace, following.x, tiles.neuron_down,
                (x, gate, scale, following.scaled, following.squares))
    return following


def _launches(x: torch.Tensor, tiles: Tiles, impl: str | None) -> bool:
    width, parts = x.shape[1], x.shape[1] // tiles.neuron_down.cols
    suits = x.dtype != torch.float32 and width % tiles.neuron_unit == 0 and not parts & (parts - 1)
    return use_triton(x, impl) and (impl is not None or suits)


def _empty_stream(x: torch.Tensor, producer: Tile) -> Stream:
    parts = x.shape[1] // producer.cols
    return Stream(torch.empty_like(x), torch.empty_like(x), x.new_empty(parts, x.shape[0], dtype=torch.float32))


def _normed(stream: Stream) -> torch.Tensor:
    """The norm without its shift, which the offset stands for."""
    width = stream.x.shape[1]
    return (stream.scaled.float() * torch.rsqrt(stream.squares.sum(0) / width + EPS)[:, None]).to(stream.x.dtype)
