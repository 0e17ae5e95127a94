# SPDX-License-Identifier: Apache-2.0
"""Device functions whose result is the same on a GPU and in Triton's interpreter.

The interpreter multiplies bf16 as raw bits and truncates where a GPU rounds; UPCAST goes round both.
"""

from __future__ import annotations

from rmuscle_kernels.runtime import jit, tl


@jit
def await_inputs(EARLY: tl.constexpr):
    """Stands before a kernel's first load or store: wait for the kernel before it, let the one after be launched."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@jit
def prefetch(pointers):
    """Before `await_inputs`: bring the cache line at each pointer to L2, of what no kernel before writes: weights."""
    tl.inline_asm_elementwise('prefetch.global.L2 [$1]; mov.b32 $0, 0;', '=r,l', [pointers.to(tl.int64)],
                              dtype=tl.int32, is_pure=False, pack=1)


@jit
def paired(values, ROWS: tl.constexpr, PAIRS: tl.constexpr):
    """Columns 0, 2, 4 .. and 1, 3, 5 .. of [ROWS, 2 PAIRS]; a thread of a tensor-core tile holds both of a pair."""
    return tl.split(tl.reshape(values, (ROWS, PAIRS, 2)))


@jit
def dot(a, b, acc, UPCAST: tl.constexpr, IEEE: tl.constexpr):
    """acc + a @ b with fp32 accumulation; fp32 operands are multiplied as fp32, never as tf32."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision='ieee')
    elif IEEE:
        return tl.dot(a, b, acc, input_precision='ieee')
    else:
        return tl.dot(a, b, acc)


@jit
def cast(value, dtype: tl.constexpr, UPCAST: tl.constexpr):
    """Convert fp32 to dtype, to nearest, ties to even."""
    if UPCAST and dtype == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        bits = bits + 0x7FFF + ((bits >> 16) & 1)
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return value.to(dtype)


@jit
def load_squares(squares, row, rows, PARTS: tl.constexpr):
    """Sums of squares of each row over parts of its columns, [PARTS, rows], a power of two of them.

    Asked for before a product and summed by `row_scale` after it, so that its operands need not wait for them.
    """
    part = tl.arange(0, PARTS)[:, None]
    return tl.load(squares + part * rows + row[None, :], mask=(row < rows)[None, :], other=0.0)


@jit
def row_scale(squares, eps, WIDTH: tl.constexpr):
    """1 / RMS of each row, as a column."""
    return tl.rsqrt(tl.sum(squares, axis=0) / WIDTH + eps)[:, None]


@jit
def gelu_tanh(x):
    """0.5 x (1 + tanh(z)) written as x * sigmoid(2 z): one exp, and no libdevice, which the interpreter lacks."""
    return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
