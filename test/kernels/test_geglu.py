# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

from rmuscle_kernels.geglu import activate, gather_geglu, gather_geglu_reference, pack_gate_up
from rmuscle_kernels.tiles import Tile

TILE = Tile(32, 32, 32)
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}


def assert_near(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Largest error relative to the largest expected value."""
    error = (got.float() - expected.float()).abs().max() / expected.float().abs().max().clamp(min=1e-6)
    assert error < TOLERANCE[got.dtype], f'relative error {error:.2e}'


@pytest.mark.parametrize('dtype', list(TOLERANCE))
@pytest.mark.parametrize('rows, width, features, chosen', [
    (40, 64, 96, 33), (40, 64, 32, 1), (31, 32, 64, None), (64, 96, 32, None), (70, 32, 32, 70),
])
def test_matches_the_reference(random, device, dtype, rows, width, features, chosen):
    x = random(rows, width, dtype=dtype)
    weight = pack_gate_up(*(random(features, width, scale=width ** -0.5, dtype=dtype) for _ in range(2)))
    index = None if chosen is None else torch.randperm(rows)[:chosen].to(torch.int32).to(device)
    out = x.new_full((chosen or rows, features), float('nan'))
    assert gather_geglu(x, weight, index, out=out, tile=TILE, impl='triton') is out
    assert_near(out, gather_geglu_reference(x.float(), weight.float(), index))


def test_weights_may_come_through_descriptors(random):
    tile = Tile(32, 32, 32, descriptors=True)
    x, weight = random(20, 64, dtype=torch.bfloat16), random(128, 64, scale=0.1, dtype=torch.bfloat16)
    assert_near(gather_geglu(x, weight, tile=tile, impl='triton'), gather_geglu_reference(x.float(), weight.float()))


@pytest.mark.parametrize('dtype', list(TOLERANCE))
@pytest.mark.parametrize('rows, features', [(3, 64), (2, 1500), (1, 1)])
def test_activation_of_a_packed_projection(random, dtype, rows, features):
    gate_up = random(rows, 2 * features, dtype=dtype)
    out = gate_up.new_full((rows, features), float('nan'))
    assert activate(gate_up, out=out, impl='triton') is out
    assert_near(out, activate(gate_up.float(), impl='reference'))


def test_no_rows_give_no_activations(device):
    index = torch.zeros(0, dtype=torch.int32, device=device)
    x, weight = torch.zeros(4, 32, device=device), torch.zeros(64, 32, device=device)
    assert gather_geglu(x, weight, index, tile=TILE, impl='triton').shape == (0, 32)


def test_sizes_that_fill_no_tile_run_the_reference_and_say_so_when_insisted_on(random, device):
    x, weight = random(5, 20), random(30, 20)
    assert torch.equal(gather_geglu(x, weight), gather_geglu_reference(x, weight))
    with pytest.raises(ValueError, match='D, the width of x, must be a multiple of 32'):
        gather_geglu(x, weight, tile=TILE, impl='triton')


@pytest.mark.parametrize('change, words', [
    ({'weight': torch.zeros(64, 16)}, 'weight must have shape'),
    ({'weight': torch.zeros(63, 32)}, 'as many gate rows'),
    ({'index': torch.zeros(3, dtype=torch.int64)}, 'index must be int32'),
    ({'out': torch.zeros(2, 32)}, 'out must have shape'),
    ({'impl': 'fast'}, 'impl must be'), ({'x': torch.zeros(32, 4).t()}, 'contiguous in its last dimension'),
])
def test_refuses_what_does_not_fit(change, words):
    with pytest.raises(ValueError, match=words):
        gather_geglu(**{'x': torch.zeros(4, 32), 'weight': torch.zeros(64, 32), **change})
