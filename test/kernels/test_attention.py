# SPDX-License-Identifier: Apache-2.0
"""Attention over a partly valid cache: the kernel against torch, tails, splits, and rows that must not be read."""

from __future__ import annotations

import pytest
import torch

from rmuscle_kernels.attention import attend, attend_reference

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.5e-2}


def operands(rows: int, heads: int, size: int, capacity: int, valid: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(rows * 1000 + valid)
    q, k, v = (torch.randn(*shape, generator=generator).to(dtype)
               for shape in ((rows, heads, size), (capacity, size), (capacity, size)))
    k[valid:], v[valid:] = float('nan'), float('nan')
    return q, k, v, torch.tensor([valid], dtype=torch.int32)


def softmax_attention(q, k, v, kv_len):
    valid = int(kv_len)
    score = torch.einsum('rhd,cd->rhc', q.double(), k[:valid].double()) / q.shape[2]**0.5
    return torch.einsum('rhc,cd->rhd', score.softmax(-1), v[:valid].double()).flatten(1)


@pytest.mark.parametrize('dtype', TOLERANCE)
@pytest.mark.parametrize(('rows', 'heads', 'size', 'capacity', 'valid', 'splits'), [
    (16, 4, 16, 64, 64, 1),
    (5, 8, 32, 50, 33, 1),  # row and key tails
    (5, 8, 32, 50, 33, 3),
    (3, 2, 16, 40, 1, 4),  # most splits have no keys
    (9, 8, 64, 80, 47, None),
    (1, 1, 16, 16, 16, 2),
])
def test_kernel_matches_plain_attention(rows, heads, size, capacity, valid, splits, dtype):
    q, k, v, kv_len = operands(rows, heads, size, capacity, valid, dtype)
    expected = softmax_attention(q, k, v, kv_len)
    out = torch.full((rows, heads * size), float('nan'), dtype=dtype)
    assert attend(q, k, v, kv_len, splits=splits, out=out, impl='triton') is out
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    reference = attend_reference(q, k, v, kv_len)
    torch.testing.assert_close(reference.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_large_scores_do_not_overflow():
    q, k, v, kv_len = operands(4, 2, 16, 48, 48, torch.float32)
    y = attend(200 * q, k, v, kv_len, splits=3, impl='triton')
    torch.testing.assert_close(y.double(), softmax_attention(200 * q, k, v, kv_len), atol=1e-4, rtol=1e-4)


def test_cache_rows_may_be_strided():
    q, k, v, kv_len = operands(4, 2, 16, 20, 20, torch.float32)
    both = torch.cat([k, v], 1)
    y = attend(q, both[:, :16], both[:, 16:], kv_len, impl='triton')
    torch.testing.assert_close(y.double(), softmax_attention(q, k, v, kv_len), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize(('change', 'message'), [
    ({'k': torch.zeros(8, 8)}, 'k must have shape'),
    ({'kv_len': torch.tensor([8])}, 'kv_len must be int32'),
    ({'q': torch.zeros(2, 16, 4).transpose(1, 2)}, 'q must be contiguous'),
])
def test_operands_that_do_not_fit_are_refused(change, message):
    operand = {'q': torch.zeros(2, 4, 16), 'k': torch.zeros(8, 16), 'v': torch.zeros(8, 16),
               'kv_len': torch.tensor([8], dtype=torch.int32), **change}
    with pytest.raises(ValueError, match=message):
        attend(**operand)


def test_odd_head_size_is_refused():
    with pytest.raises(ValueError, match='power of two'):
        attend(torch.zeros(2, 4, 24), torch.zeros(8, 24), torch.zeros(8, 24), torch.tensor([8], dtype=torch.int32),
               impl='triton')
