# SPDX-License-Identifier: Apache-2.0
"""A GeGLU FFN that evaluates only some neurons and reads only their weights.

    y = residual[slot] + sum over j in neurons[slot, :n] of gelu_tanh(x @ gate[j]) * (x @ up[j]) * down[:, j]

Weights are neuron-major, so one neuron is two contiguous runs (gate and up; its column of down) and any subset is
read at full bandwidth without copying it first. Two launches: gate and up, then down with the neurons split over
programs; the last program to finish an output tile adds the parts in a fixed order, so the result does not depend on
timing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from rmuscle_kernels.numerics import await_inputs, cast, dot, gelu_tanh, load_squares, paired, prefetch, row_scale
from rmuscle_kernels.runtime import DTYPES, expect, jit, launch, multiple, numerics, tl, triton, use_triton
from rmuscle_kernels.tiles import Tile, Tiles, tiles_for

EPS = 1e-6
PAD = 256  # hidden is padded with zeros to this many neurons, so that no tile of the second launch needs a mask


@jit(do_not_specialize=['rows', 'n'])
def neuron_gate_up_kernel(x, squares, offset, gate_up, neurons, slot, hidden, rows, n, eps, x_stride, slot_stride,
                          hidden_stride, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
                          DEPTH: tl.constexpr, CHOSEN: tl.constexpr, PARTS: tl.constexpr, UPCAST: tl.constexpr,
                          IEEE: tl.constexpr, EARLY: tl.constexpr):
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    # a neuron's gate and up are neighbours in memory and in the tile: one product for both
    pair = tl.arange(0, 2 * COLS)
    neuron = tl.minimum(tl.program_id(0) * COLS + pair // 2, n - 1)  # tails read valid memory again, zeroed below
    if CHOSEN:
        neuron = tl.load(neurons + tl.load(slot).to(tl.int64) * slot_stride + neuron)
    feature = neuron * 2 + pair % 2
    if PARTS:
        added = tl.load(offset + feature)
    if EARLY:
        for start in tl.static_range(0, WIDTH, DEPTH):
            prefetch(gate_up + feature[None, :] * WIDTH + (start + tl.arange(0, DEPTH // 64) * 64)[:, None])
    await_inputs(EARLY)
    depth = tl.arange(0, DEPTH)
    inside = row < rows
    x_block = x + row[:, None] * x_stride + depth[None, :]
    weight_block = gate_up + feature[None, :] * WIDTH + depth[:, None]
    acc = tl.zeros((ROWS, 2 * COLS), tl.float32)
    if PARTS:
        sums = load_squares(squares, row, rows, PARTS)
    for _ in range(0, WIDTH, DEPTH):
        a = tl.load(x_block, mask=inside[:, None], other=0.0)
        b = tl.load(weight_block)
        acc = dot(a, b, acc, UPCAST, IEEE)
        x_block += DEPTH
        weight_block += DEPTH
    if PARTS:
        acc = acc * row_scale(sums, eps, WIDTH) + added[None, :]
    gate, up = paired(acc, ROWS, COLS)
    place = tl.program_id(0) * COLS + tl.arange(0, COLS)
    h = tl.where(inside[:, None] & (place < n)[None, :], gelu_tanh(gate) * up, 0.0)
    tl.store(hidden + row[:, None] * hidden_stride + place[None, :], cast(h, hidden.dtype.element_ty, UPCAST))


@jit(do_not_specialize=['rows', 'n'])
def neuron_down_kernel(hidden, down, neurons, slot, residual, stream, gate, scale, scaled, squares, partial, arrived,
                       out, rows, n, per_split, hidden_stride, slot_stride, residual_slot_stride, residual_stride,
                       stream_stride, out_stride, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
                       DEPTH: tl.constexpr, SPLITS: tl.constexpr, CHOSEN: tl.constexpr, RESIDUAL: tl.constexpr,
                       ADD: tl.constexpr, UPCAST: tl.constexpr, IEEE: tl.constexpr, EARLY: tl.constexpr):
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    depth = split * per_split + tl.arange(0, DEPTH)
    if CHOSEN:
        neurons += tl.load(slot).to(tl.int64) * slot_stride
    stop = tl.minimum((split + 1) * per_split, n)
    # the next block's neurons are carried through the loop: a load that hangs on another cannot be pipelined
    neuron = tl.minimum(depth, n - 1)
    if CHOSEN:
        neuron = tl.load(neurons + neuron)
    if EARLY:
        prefetch(down + neuron * WIDTH + tl.program_id(0) * COLS)
    await_inputs(EARLY)
    acc = tl.zeros((ROWS, COLS), tl.float32)
    for _ in range(split * per_split, stop, DEPTH):
        a = tl.load(hidden + row[:, None] * hidden_stride + depth[None, :])
        b = tl.load(down + neuron[:, None] * WIDTH + col[None, :])
        depth += DEPTH
        neuron = tl.minimum(depth, n - 1)
        if CHOSEN:
            neuron = tl.load(neurons + neuron)
        acc = dot(a, b, acc, UPCAST, IEEE)
    size = tl.num_programs(2) * ROWS * WIDTH
    place = row[:, None] * WIDTH + col[None, :]
    tl.store(partial + split * size + place, acc)
    tl.debug_barrier()  # every thread's part is written before one thread says so
    counter = arrived + tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    if tl.atomic_add(counter, 1, sem='acq_rel') == splits - 1:
        mask = (row < rows)[:, None] & (col < WIDTH)[None, :]
        total = tl.zeros((ROWS, COLS), tl.float32)
        if RESIDUAL:
            remembered = residual + tl.load(slot).to(tl.int64) * residual_slot_stride
            total += tl.load(remembered + row[:, None] * residual_stride + col[None, :], mask=mask,
                             other=0.0).to(tl.float32)
        for part in tl.static_range(SPLITS):  # unrolled, so that the parts are on their way together
            # .cg: other processors wrote these, so this one's L1 must not answer
            total += tl.load(partial + part * size + place, mask=mask & (0 * row + part < splits)[:, None], other=0.0,
                             cache_modifier='.cg')
        if ADD:
            before = tl.load(stream + row[:, None] * stream_stride + col[None, :], mask=mask, other=0.0)
            total = before.to(tl.float32) + total * tl.load(gate + col)[None, :]
        result = cast(total, out.dtype.element_ty, UPCAST)
        place = row[:, None] * out_stride + col[None, :]
        tl.store(out + place, result, mask=mask)
        if ADD:
            value = tl.where(mask, result.to(tl.float32), 0.0)
            following = value * (1.0 + tl.load(scale + col))[None, :]
            tl.store(scaled + place, cast(following, out.dtype.element_ty, UPCAST), mask=mask)
            tl.store(squares + tl.program_id(0) * rows + row, tl.sum(value * value, axis=1), mask=row < rows)
        tl.store(counter, 0)  # ready for the next launch, or the next replay of a CUDA graph


@dataclass(frozen=True)
class NeuronWorkspace:
    """Scratch of `neuron_ffn`, reusable by any number of calls in one stream (two streams need one each)."""

    hidden: torch.Tensor  # [rows padded, neurons padded]
    partial: torch.Tensor  # fp32 [splits * rows padded * W]
    arrived: torch.Tensor  # int32, one counter per output tile; zero between calls

    def check(self, rows: int, width: int, n: int, tiles: Tiles) -> None:
        """Raise ValueError when a call of this size would write past the end."""
        needed = _scratch(rows, width, n, tiles)
        have = (*self.hidden.shape, self.partial.numel(), self.arrived.numel())
        if any(mine < wanted for mine, wanted in zip(have, needed)):
            raise ValueError(f'the workspace is too small for {rows} rows, width {width} and {n} neurons; make it with '
                             'neuron_workspace for the largest call')


def neuron_workspace(rows: int, width: int, n: int, dtype: torch.dtype, device: torch.device | str, *,
                     tiles: Tiles | None = None) -> NeuronWorkspace:
    """Allocate scratch for up to this many rows and neurons."""
    tall, wide, parts, counters = _scratch(rows, width, n, tiles or tiles_for(torch.device(device)))
    return NeuronWorkspace(torch.empty(tall, wide, dtype=dtype, device=device),
                           torch.empty(parts, dtype=torch.float32, device=device),
                           torch.zeros(counters, dtype=torch.int32, device=device))


def pack_neurons(gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gate_up [N, 2, W] and down_t [N, W] from nn.Linear weights gate, up [N, W] and down [W, N]."""
    return torch.stack([gate, up], dim=1).contiguous(), down.t().contiguous()


def neuron_ffn(x: torch.Tensor, gate_up: torch.Tensor, down_t: torch.Tensor, neurons: torch.Tensor | None = None,
               slot: torch.Tensor | None = None, n: int | None = None, residual: torch.Tensor | None = None, *,
               out: torch.Tensor | None = None, workspace: NeuronWorkspace | None = None, tiles: Tiles | None = None,
               impl: str | None = None) -> torch.Tensor:
    """FFN output [H, W] from the first n neurons of a reference's ranking, on top of its residual.

    x: [H, W]. gate_up: [N, 2, W] and down_t: [N, W], contiguous, see `pack_neurons`. neurons: int32 [slots, n_mask], or
    None for all N. slot: int32 of one element, on the device. residual: [slots, H, W] or None.
    workspace: its ``hidden`` then holds the activations [H, n] of this call until the next one, on every path.
    Indices are not checked for range or duplicates (that would sync): a neuron listed twice counts twice.
    The kernels need W a multiple of the tiles' depth and cols; other widths run the reference, and so does fp32. Raises
    ValueError for shapes that do not fit, n > n_mask, or where impl insists in vain.
    """
    n = _check(x, gate_up, down_t, neurons, slot, n, residual, out)
    rows, width = x.shape
    tiles = tiles or tiles_for(x.device)
    unit = tiles.neuron_unit
    suits = x.dtype != torch.float32 and width % unit == 0
    if n == 0 or not use_triton(x, impl) or (impl is None and not suits):
        y = neuron_ffn_reference(x, gate_up, down_t, neurons, slot, n, residual, workspace=workspace)
        return y if out is None else out.copy_(y)
    multiple('W, the width of x,', width, of=unit)
    work = workspace or neuron_workspace(rows, width, n, x.dtype, x.device, tiles=tiles)
    work.check(rows, width, n, tiles)
    out = torch.empty_like(x) if out is None else out
    launch_gate_up(x, None, None, gate_up, neurons, slot, n, work.hidden, tiles)
    launch_down(work.hidden, down_t, neurons, slot, n, residual, work, out, tiles.neuron_down)
    return out


def launch_gate_up(x, squares, offset, gate_up, neurons, slot, n, hidden, tiles: Tiles) -> None:
    """First launch, unchecked; squares and offset not None: x is a stream that was only scaled, see layer.py."""
    rows, width = x.shape
    up, down = tiles.gate_up_for(n), tiles.neuron_down
    row_tiles = triton.cdiv(_padded(rows, down.rows), up.rows)
    neuron_gate_up_kernel[(triton.cdiv(_padded(n, down.depth), up.cols), row_tiles)](
        x, squares, offset, gate_up, neurons, slot, hidden, rows, n, EPS, x.stride(0),
        0 if neurons is None else neurons.stride(0), hidden.stride(0), WIDTH=width, ROWS=up.rows, COLS=up.cols,
        DEPTH=up.depth, CHOSEN=neurons is not None, PARTS=0 if squares is None else squares.shape[0],
        **numerics(x.dtype), **up.launch, **launch(x))


def launch_down(hidden, down_t, neurons, slot, n, residual, work: NeuronWorkspace, out, down: Tile,
                add: tuple[torch.Tensor, ...] | None = None) -> None:
    """Second launch, unchecked.

    add: (stream, gate, scale, scaled, squares) when the result is gated and added to a stream, see layer.py.
    """
    rows, width = out.shape
    stream, gate, scale, scaled, squares = add or (None,) * 5
    per_split = _padded(triton.cdiv(n, down.splits), down.depth)
    neuron_down_kernel[(width // down.cols, triton.cdiv(n, per_split), triton.cdiv(rows, down.rows))](
        hidden, down_t, neurons, slot, residual, stream, gate, scale, scaled, squares, work.partial, work.arrived, out,
        rows, n, per_split, hidden.stride(0), 0 if neurons is None else neurons.stride(0),
        0 if residual is None else residual.stride(0), 0 if residual is None else residual.stride(1),
        0 if stream is None else stream.stride(0), out.stride(0),
        WIDTH=width, ROWS=down.rows, COLS=down.cols, DEPTH=down.depth, SPLITS=down.splits,
        CHOSEN=neurons is not None, RESIDUAL=residual is not None, ADD=add is not None, **numerics(out.dtype),
        **down.launch, **launch(out))


def neuron_ffn_reference(x: torch.Tensor, gate_up: torch.Tensor, down_t: torch.Tensor,
                         neurons: torch.Tensor | None = None, slot: torch.Tensor | None = None, n: int | None = None,
                         residual: torch.Tensor | None = None, offset: torch.Tensor | None = None,
                         workspace: NeuronWorkspace | None = None) -> torch.Tensor:
    """Torch reference of `neuron_ffn`; offset: fp32 [N, 2] added to gate and up, see layer.py."""
    if neurons is not None:
        chosen = neurons.index_select(0, slot)[0, :n]
        gate_up, down_t = gate_up.index_select(0, chosen), down_t.index_select(0, chosen)
        offset = None if offset is None else offset.index_select(0, chosen)
    gate, up = F.linear(x, gate_up[:, 0]), F.linear(x, gate_up[:, 1])
    if offset is not None:
        gate, up = ((part.float() + side).to(x.dtype) for part, side in zip((gate, up), offset.unbind(1)))
    hidden = F.gelu(gate, approximate='tanh') * up
    if workspace is not None:
        workspace.hidden[:hidden.shape[0], :hidden.shape[1]] = hidden
    y = hidden @ down_t
    return y if residual is None else y + residual.index_select(0, slot)[0]


def _padded(size: int, to: int) -> int:
    return -(-size // to) * to


def _scratch(rows: int, width: int, n: int, tiles: Tiles) -> tuple[int, int, int, int]:
    split = tiles.neuron_down, tiles.out
    tall = _padded(rows, max(tile.rows for tile in (*split, tiles.neuron_gate_up, tiles.neuron_gate_up_wide)))
    return (tall, _padded(n, PAD), max(tile.splits for tile in split) * tall * width,
            max(tall // tile.rows * (width // tile.cols) for tile in split))


def _check(x, gate_up, down_t, neurons, slot, n, residual, out) -> int:
    expect('x', x, (None, None))
    rows, width = x.shape
    expect('gate_up', gate_up, (None, 2, width), x.dtype)
    total = gate_up.shape[0]
    expect('down_t', down_t, (total, width), x.dtype)
    if not (gate_up.is_contiguous() and down_t.is_contiguous()):
        raise ValueError('gate_up and down_t must be contiguous; make them with pack_neurons')
    if neurons is None:
        if n not in (None, total):
            raise ValueError(f'n must be left out or {total}, all neurons, when neurons is None, not {n}')
        n = total
    else:
        expect('neurons', neurons, (None, None), torch.int32)
        n = neurons.shape[1] if n is None else n
        if not 0 <= n <= neurons.shape[1]:
            raise ValueError(f'n must lie in [0, {neurons.shape[1]}], the neurons a reference ranks, not {n}; raise '
                             'mask_ratio when building the library, or lower neuron_ratio')
    if slot is None and (neurons is not None or residual is not None):
        raise ValueError('slot must name the reference that neurons and residual are read from')
    if residual is not None:
        expect('residual', residual, (None, rows, width), *DTYPES)
    if out is not None:
        expect('out', out, (rows, width), x.dtype)
    return n
