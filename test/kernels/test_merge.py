# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

from rmuscle_kernels.merge import merge_rows, merge_rows_reference
from rmuscle_kernels.select import select_tokens_reference


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float32])
@pytest.mark.parametrize('tokens, width, k, n_text', [(20, 64, 7, 3), (9, 100, 0, 2), (9, 2100, 9, 0), (5, 8, 0, 0)])
def test_matches_the_reference_bit_for_bit(random, slot, dtype, tokens, width, k, n_text):
    arena = random(2, 3, tokens, width, dtype=dtype)
    reference_y = arena[:, 1]
    residual = random(tokens + n_text, width, dtype=dtype)
    _, inverse = select_tokens_reference(residual, reference_y, slot, k, n_text)
    rows = random(k + n_text, width, dtype=dtype)
    out = torch.full_like(residual, float('nan'))
    assert merge_rows(residual, rows, inverse, reference_y, out, impl='triton') is out
    assert torch.equal(out, merge_rows_reference(residual, rows, inverse, reference_y))
    assert torch.equal(out[tokens:], residual[tokens:] + rows[k:])


def test_may_write_over_the_residual(random, device):
    residual, rows = random(6, 16), random(2, 16)
    inverse = torch.tensor([-1, 0, -2, -1, 1, -2], dtype=torch.int32, device=device)
    reference_y = random(2, 6, 16)
    expected = merge_rows_reference(residual, rows, inverse, reference_y)
    merge_rows(residual, rows, inverse, reference_y, residual, impl='triton')
    assert torch.equal(residual, expected)


def test_without_a_residual_each_row_is_the_output_of_its_slot(random, device):
    rows, reference_y = random(2, 16), random(2, 4, 16)
    inverse = torch.tensor([-1, 0, -2, -1, 1], dtype=torch.int32, device=device)
    y = merge_rows(None, rows, inverse, reference_y, impl='triton')
    first, second = reference_y
    assert torch.equal(y, torch.stack([first[0], rows[0], second[2], first[3], rows[1]]))


def test_refuses_a_foreign_width():
    with pytest.raises(ValueError, match='residual must have shape'):
        merge_rows(torch.zeros(4, 8), torch.zeros(2, 9), torch.zeros(4, dtype=torch.int32), torch.zeros(1, 4, 8))
