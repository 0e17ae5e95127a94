# SPDX-License-Identifier: Apache-2.0
"""LayerNorm with its biased add: the kernel against torch, in widths that are no power of two."""

from __future__ import annotations

import pytest
import torch

from rmuscle_kernels.layer_norm import add_layer_norm, add_layer_norm_reference


@pytest.mark.parametrize('dtype, tolerance', [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize('rows, width', [(5, 72), (3, 64), (1, 130)])
def test_kernel_equals_torch(random, rows, width, dtype, tolerance):
    x, delta = random(rows, width, dtype=dtype) + 3, random(rows, width, dtype=dtype)
    bias, weight, shift = (random(width, dtype=dtype) for _ in range(3))
    total, y = add_layer_norm(x, delta, bias, weight, shift, impl='triton')
    expected = add_layer_norm_reference(x, delta, bias, weight, shift)
    assert torch.equal(total, expected[0])
    torch.testing.assert_close(y, expected[1], atol=tolerance, rtol=tolerance)
    plain = torch.nn.functional.layer_norm(total.double(), (width,), weight.double(), shift.double(), 1e-6)
    torch.testing.assert_close(y.double(), plain, atol=tolerance, rtol=tolerance)


def test_refuses_what_does_not_fit(device):
    x, vector = torch.zeros(2, 8, device=device), torch.zeros(8, device=device)
    with pytest.raises(ValueError, match='bias must have shape'):
        add_layer_norm(x, x, vector[:4], vector, vector)
    with pytest.raises(ValueError, match='contiguous rows'):
        add_layer_norm(torch.zeros(2, 16, device=device)[:, :8], x, vector, vector, vector, impl='triton')
