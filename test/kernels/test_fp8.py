# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

from rmuscle_kernels.fp8 import dequantize, fp8_linear, quantize


def test_each_value_is_within_half_a_step_of_three_mantissa_bits():
    weight = torch.randn(32, 200, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 4, 32)[:, None]
    q, scale = quantize(weight)
    assert q.dtype == torch.float8_e4m3fn and scale.shape == (32,)
    normal = weight.abs() >= 2.0 ** -6 * scale[:, None]  # below that e4m3 is subnormal: a fixed step
    error = (dequantize(q, scale) - weight).abs()
    assert (error[normal] <= weight.abs()[normal] * 2.0 ** -4 * 1.001).all()
    assert (error <= torch.where(normal, error, 2.0 ** -10 * scale[:, None] * 1.001)).all()


def test_the_product_loses_about_what_the_format_costs():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 512, generator=generator) * 512 ** -0.5
    x = torch.randn(20, 512, generator=generator)
    exact, got = x @ weight.t(), fp8_linear(x, *quantize(weight))
    assert 0.005 < (got - exact).norm() / exact.norm() < 0.04
    torch.testing.assert_close(got, x @ dequantize(*quantize(weight)).t(), rtol=1e-4, atol=1e-5)


def test_an_empty_channel_stays_zero():
    q, scale = quantize(torch.zeros(2, 8))
    assert not dequantize(q, scale).any()


def test_refuses_what_is_not_finite():
    weight = torch.ones(3, 8)
    weight[1, 2] = float('inf')
    with pytest.raises(ValueError, match='output channel 1'):
        quantize(weight)
