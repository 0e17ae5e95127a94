# SPDX-License-Identifier: Apache-2.0
"""Which prefix rows to recompute: the visual tokens that changed most against the references, and all text.

    change[i] = min over references r of ||x[i] - r[i]||^2 / (||r[i]||^2 + eps)

Every token is compared with the same token of several references and keeps the one that is most alike. Two launches.
The second finds the k-th largest change two bits at a time (the order of non-negative floats is the order of their bit
patterns), so it costs 16 rounds of counting T values, not T^2 comparisons or a sort.
"""

from __future__ import annotations

import torch

from rmuscle_kernels.numerics import await_inputs
from rmuscle_kernels.runtime import expect, jit, launch, tl, triton, use_triton

MAX_TOKENS = 8192


@jit(do_not_specialize=['rows'])
def change_kernel(x, reference, slots, change, donor, rows, width, eps, x_stride, slot_stride, reference_stride,
                  COUNT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, EARLY: tl.constexpr):
    await_inputs(EARLY)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    least = tl.full((ROWS,), float('inf'), tl.float32)
    nearest = tl.zeros((ROWS,), tl.int32) + tl.load(slots)
    for i in tl.static_range(COUNT):
        slot = tl.load(slots + i)
        kept = reference + slot.to(tl.int64) * slot_stride
        moved = tl.zeros((ROWS,), tl.float32)
        size = tl.zeros((ROWS,), tl.float32)
        for start in range(0, width, WIDTH):
            col = start + tl.arange(0, WIDTH)
            mask = (row < rows)[:, None] & (col < width)[None, :]
            now = tl.load(x + row[:, None] * x_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
            then = tl.load(kept + row[:, None] * reference_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
            moved += tl.sum((now - then) * (now - then), axis=1)
            size += tl.sum(then * then, axis=1)
        amount = moved / (size + eps)
        nearer = amount < least  # never for a NaN: a row that can be compared with none stays at infinity
        least = tl.where(nearer, amount, least)
        nearest = tl.where(nearer, slot, nearest)
    tl.store(change + row, least, mask=row < rows)
    tl.store(donor + row, nearest, mask=row < rows)


@jit(do_not_specialize=['rows', 'n_text', 'k'])
def choose_kernel(change, donor, index, inverse, rows, n_text, k, ROWS: tl.constexpr, TEXT: tl.constexpr,
                  EARLY: tl.constexpr):
    await_inputs(EARLY)
    row = tl.arange(0, ROWS)
    valid = row < rows
    value = tl.load(change + row, mask=valid, other=0.0)  # infinite for a row that cannot be compared
    bits = tl.where(valid, value.to(tl.int32, bitcast=True), -1)
    threshold = 0
    for i in range(15):
        place = 29 - 2 * i
        digit = 0
        for trial in tl.static_range(1, 4):
            digit += (tl.sum((bits >= (threshold | (trial << place))).to(tl.int32), axis=0) >= k).to(tl.int32)
        threshold = threshold | (digit << place)
    threshold = tl.where(tl.sum((bits >= (threshold | 1)).to(tl.int32), axis=0) >= k, threshold | 1, threshold)
    above = bits > threshold
    tied = bits == threshold
    room = k - tl.sum(above.to(tl.int32), axis=0)
    chosen = above | (tied & (tl.cumsum(tied.to(tl.int32), axis=0) <= room))
    position = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    tl.store(index + position, row, mask=chosen)
    reused = -1 - tl.load(donor + row, mask=valid, other=0)
    tl.store(inverse + row, tl.where(chosen, position, reused), mask=valid)
    text = tl.arange(0, TEXT)
    tl.store(index + k + text, rows + text, mask=text < n_text)
    tl.store(inverse + rows + text, k + text, mask=text < n_text)


def select_tokens(x: torch.Tensor, reference: torch.Tensor, slots: torch.Tensor, k: int, n_text: int, *,
                  eps: float = 1e-6, impl: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the rows whose FFN is recomputed, and where the others' outputs come from; no host sync, deterministic.

    x: [T + n_text, D'] (visual rows first; [T, D'] will do, text rows are not read); D' is the full width or that of
        a sketch of it.
    reference: [slots, T, D'], any strides in the first two dimensions. slots: int32 [R] on the device, those a token
        may choose from (ties go to the first).
    Returns index int32 [k + n_text], the k most changed visual rows ascending (ties go to the lower row, a NaN counts
    as changed most), then the text rows; and inverse int32 [T + n_text], a row's position in index, or -1 - s where
    slot s has its output.
    Raises ValueError for shapes that do not fit or k outside [0, T].
    """
    expect('reference', reference, (None, None, None))
    tokens, width = reference.shape[1:]
    expect('x', x, (None, width))
    if x.shape[0] not in (tokens, tokens + n_text) or n_text < 0:
        raise ValueError(f'x must have {tokens} visual rows, as the reference has, and {n_text} text rows, not '
                         f'{x.shape[0]} in all')
    if not 0 <= k <= tokens:
        raise ValueError(f'k must lie in [0, {tokens}], the number of visual rows, not {k}')
    if not use_triton(x, impl):
        return select_tokens_reference(x, reference, slots, k, n_text, eps=eps)
    if tokens > MAX_TOKENS:
        raise ValueError(f"select_tokens takes at most {MAX_TOKENS} visual rows, not {tokens}; pass impl='reference'")
    change = torch.empty(tokens, dtype=torch.float32, device=x.device)
    donor = torch.empty(tokens, dtype=torch.int32, device=x.device)
    index = torch.empty(k + n_text, dtype=torch.int32, device=x.device)
    inverse = torch.empty(tokens + n_text, dtype=torch.int32, device=x.device)
    block = min(2048, triton.next_power_of_2(width))
    group = 2048 // block if block < 512 else 1  # narrow rows share a program
    change_kernel[(triton.cdiv(tokens, group),)](
        x, reference, slots, change, donor, tokens, width, eps, x.stride(0), reference.stride(0), reference.stride(1),
        COUNT=slots.shape[0], ROWS=group, WIDTH=block, num_warps=4, **launch(x))
    padded = triton.next_power_of_2(tokens)
    # one warp counts 1024 values without a barrier; a barrier a round is what this launch would spend its time on
    choose_kernel[(1,)](change, donor, index, inverse, tokens, n_text, k, ROWS=padded,
                        TEXT=triton.next_power_of_2(max(n_text, 1)), num_warps=max(1, padded // 1024), **launch(x))
    return index, inverse


def select_tokens_reference(x: torch.Tensor, reference: torch.Tensor, slots: torch.Tensor, k: int, n_text: int, *,
                            eps: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    """Torch reference of `select_tokens`."""
    tokens = reference.shape[1]
    then = reference.index_select(0, slots).float()  # [R, T, D']
    moved = (x[:tokens].float() - then).square().sum(-1)
    change = (moved / (then.square().sum(-1) + eps)).nan_to_num(nan=float('inf'), posinf=float('inf'))
    change, nearest = change.min(0)
    visual = change.sort(descending=True, stable=True).indices[:k].sort().values
    text = torch.arange(tokens, tokens + n_text, device=x.device)
    index = torch.cat([visual, text])
    inverse = torch.full((tokens + n_text,), -1, dtype=torch.int32, device=x.device)
    inverse[:tokens] -= slots.to(x.device)[nearest]
    inverse[index] = torch.arange(k + n_text, dtype=torch.int32, device=x.device)
    return index.to(torch.int32), inverse
