# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

from rmuscle_kernels.select import select_tokens, select_tokens_reference


@pytest.mark.parametrize('tokens, width, k, n_text, dtype', [
    (48, 64, 17, 5, torch.bfloat16), (50, 96, 25, 0, torch.float32), (33, 2100, 8, 3, torch.float16),
    (16, 24, 0, 4, torch.float32), (16, 24, 16, 4, torch.float32), (1, 8, 1, 1, torch.float32),
])
def test_kernel_chooses_what_the_reference_chooses(random, slot, tokens, width, k, n_text, dtype):
    reference = random(3, tokens, width, dtype=dtype)
    # distinct distances, far enough apart that the order of summation cannot swap two rows
    factor = 1 + torch.randperm(tokens, generator=torch.Generator().manual_seed(1)).to(slot.device)[:, None] / tokens
    x = torch.cat([(reference[1].float() * factor).to(dtype), random(n_text, width, dtype=dtype)])
    index, inverse = select_tokens(x, reference, slot, k, n_text, impl='triton')
    expected_index, expected_inverse = select_tokens_reference(x, reference, slot, k, n_text)
    assert index.dtype == inverse.dtype == torch.int32
    torch.testing.assert_close(index, expected_index)
    torch.testing.assert_close(inverse, expected_inverse)


@pytest.mark.parametrize('impl', ['triton', 'reference'])
def test_ties_go_to_the_lower_row_and_nan_counts_as_changed(device, slot, impl):
    reference = torch.ones(2, 9, 4, device=device)
    x = torch.ones(11, 4, device=device)
    x[[2, 5, 6, 8]] = 2.0  # four equal changes, room for three of them beside the NaN
    x[7] = float('nan')
    index, inverse = select_tokens(x, reference, slot, 4, 2, impl=impl)
    assert index.tolist() == [2, 5, 6, 7, 9, 10]
    assert inverse.tolist() == [-2, -2, 0, -2, -2, 1, 2, 3, -2, 4, 5]  # slot 1 has the others


def test_many_nan_rows_stay_inside_the_index(device, slot):
    x = torch.full((12, 4), float('nan'), device=device)
    index, _ = select_tokens(x, torch.ones(2, 12, 4, device=device), slot, 3, 0, impl='triton')
    assert index.tolist() == [0, 1, 2]


def test_change_is_relative_to_the_reference(device, slot):
    reference = torch.ones(2, 2, 4, device=device)
    reference[1, 0] = 100.0
    x = reference[1] + torch.tensor([[5.0], [1.0]], device=device)  # 5 % and 100 %
    assert select_tokens(x, reference, slot, 1, 0, impl='triton')[0].tolist() == [1]


@pytest.mark.parametrize('impl', ['triton', 'reference'])
def test_each_token_takes_the_reference_it_differs_least_from(device, impl):
    reference = torch.ones(4, 5, 8, device=device)
    x = torch.full((5, 8), 2.0, device=device)
    reference[3, 0], reference[1, 1], reference[3, 2] = 2.0, 1.9, float('nan')
    reference[:, 4] = float('nan')  # can be compared with none: recomputed first
    slots = torch.tensor([2, 3, 1], dtype=torch.int32, device=device)
    index, inverse = select_tokens(x, reference, slots, 2, 0, impl=impl)
    assert index.tolist() == [2, 4]
    assert inverse.tolist() == [-4, -2, 0, -3, 1]  # a tie goes to the first of the slots


@pytest.mark.parametrize('count', [1, 2, 3, 5])
def test_kernel_agrees_whatever_the_number_of_references(random, device, count):
    reference = random(6, 40, 48)
    x = reference[torch.arange(40, device=device) % 6, torch.arange(40, device=device)] + 0.1 * random(40, 48)
    slots = torch.arange(5, 5 - count, -1, dtype=torch.int32, device=device)
    for got, want in zip(select_tokens(x, reference, slots, 12, 0, impl='triton'),
                         select_tokens_reference(x, reference, slots, 12, 0)):
        assert torch.equal(got, want)


def test_arena_views_with_any_slot_stride(random, slot):
    arena = random(2, 5, 20, 16)  # [slots, L, T, D]
    x = random(20, 16)
    got = select_tokens(x, arena[:, 3], slot, 7, 0, impl='triton')
    torch.testing.assert_close(got, select_tokens(x, arena[:, 3].contiguous(), slot, 7, 0, impl='reference'))


@pytest.mark.parametrize('k, n_text, words', [(9, 0, 'k must lie in'), (-1, 0, 'k must lie in'), (2, 3, 'visual rows')])
def test_refuses_what_does_not_fit(slot, k, n_text, words):
    with pytest.raises(ValueError, match=words):
        select_tokens(torch.zeros(10, 4), torch.zeros(2, 8, 4), slot.cpu(), k, n_text if n_text else 2)
