# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

from rmuscle_kernels.rope import rope, rope_reference


def tables(rows, half, device):
    angle = torch.arange(rows)[:, None] * 10.0 ** -torch.linspace(0, 3, half)[None, :]
    return angle.cos().to(device), angle.sin().to(device)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float32])
@pytest.mark.parametrize('rows, heads, size', [(5, 8, 16), (3, 2, 24), (1, 1, 256)])
def test_matches_the_reference(random, device, dtype, rows, heads, size):
    qkv = random(rows, (heads + 2) * size, dtype=dtype)
    cos, sin = tables(rows, size // 2, device)
    got = rope(qkv, cos, sin, heads, impl='triton')
    tolerance = 8e-3 if dtype == torch.bfloat16 else 1e-6
    for mine, expected in zip(got, rope_reference(qkv, cos, sin, heads)):
        torch.testing.assert_close(mine, expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(got[2], qkv[:, -size:])


@pytest.mark.parametrize('impl', ['triton', 'reference'])
def test_writes_only_its_rows_of_the_cache(random, device, impl):
    qkv = random(4, 4 * 8)
    cos, sin = tables(4, 4, device)
    cache = tuple(torch.full((9, 8), float('nan'), device=device) for _ in range(2))
    _, k, v = rope(qkv, cos, sin, 2, cache=cache, offset=3, impl=impl)
    _, expected_k, expected_v = rope_reference(qkv, cos, sin, 2)
    for tensor, view, expected in zip(cache, (k, v), (expected_k, expected_v)):
        torch.testing.assert_close(tensor[3:7], expected)
        assert view.data_ptr() == tensor[3:].data_ptr()
        assert tensor[:3].isnan().all() and tensor[7:].isnan().all()


def test_the_first_row_is_turned_by_nothing_and_length_is_kept(random, device):
    qkv = random(6, 3 * 16)
    q, k, _ = rope(qkv, *tables(6, 8, device), 1, impl='triton')
    torch.testing.assert_close(q[0, 0], qkv[0, :16])
    torch.testing.assert_close(k.norm(dim=1), qkv[:, 16:32].norm(dim=1))


def test_flat_queries_attend_like_heads(random, device):
    qkv = random(7, 5 * 16)
    q, k, v = rope(qkv, *tables(7, 8, device), 3)
    attend = torch.nn.functional.scaled_dot_product_attention
    flat = attend(q.view(1, 1, 21, 16), k[None, None], v[None, None]).view(7, 48)
    heads = attend(q.transpose(0, 1)[None], k.expand(1, 3, 7, 16), v.expand(1, 3, 7, 16))
    torch.testing.assert_close(flat, heads[0].transpose(0, 1).reshape(7, 48))


@pytest.mark.parametrize('change, words', [
    ({'heads': 3}, 'multiple of 10'), ({'cos': torch.zeros(4, 3)}, 'cos must have shape'),
    ({'cache': (torch.zeros(5, 8), torch.zeros(5, 8)), 'offset': 2}, 'cannot take 4 at row 2'),
])
def test_refuses_what_does_not_fit(change, words):
    good = {'qkv': torch.zeros(4, 32), 'cos': torch.zeros(4, 4), 'sin': torch.zeros(4, 4), 'heads': 2}
    with pytest.raises(ValueError, match=words):
        rope(**{**good, **change})
