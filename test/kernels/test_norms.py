# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

from rmuscle_kernels.norms import ada_rms_norm, add_rms_norm, gated_add_ada_rms_norm, norm_reference, rms_norm

TOLERANCE = {torch.bfloat16: 8e-3, torch.float32: 2e-6}


@pytest.mark.parametrize('dtype', list(TOLERANCE))
@pytest.mark.parametrize('rows, width', [(5, 64), (3, 100), (2, 2048), (1, 1)])
def test_each_form_matches_the_reference(random, dtype, rows, width):
    x, delta = random(rows, width, dtype=dtype), random(rows, width, dtype=dtype)
    scale, shift, gate = (random(width) for _ in range(3))
    forms = [((None, rms_norm(x, scale, impl='triton')), (x, scale)),
             ((None, ada_rms_norm(x, scale, shift, impl='triton')), (x, scale, shift)),
             (add_rms_norm(x, delta, scale, impl='triton'), (x, scale, None, delta)),
             (gated_add_ada_rms_norm(x, delta, gate, scale, shift, impl='triton'), (x, scale, shift, delta, gate))]
    for (total, y), arguments in forms:
        expected_total, expected = norm_reference(*arguments)
        torch.testing.assert_close(y, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        if total is not None:
            torch.testing.assert_close(total, expected_total, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_the_formula_by_hand():
    x = torch.tensor([[3.0, 4.0]])
    got = ada_rms_norm(x, torch.tensor([0.0, 1.0]), torch.tensor([0.0, 10.0]), eps=0.0)
    torch.testing.assert_close(got, torch.tensor([[3.0, 8.0]]) / 12.5 ** 0.5 + torch.tensor([[0.0, 10.0]]))


def test_rows_may_be_strided(random):
    x = random(6, 48)[:, :32]
    weight = random(32)
    torch.testing.assert_close(rms_norm(x, weight, impl='triton'), rms_norm(x, weight, impl='reference'))


def test_refuses_a_weight_of_another_width():
    with pytest.raises(ValueError, match='weight or scale must have shape'):
        rms_norm(torch.zeros(2, 8), torch.zeros(9))
