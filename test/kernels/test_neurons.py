# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

from rmuscle_kernels.neurons import neuron_ffn, neuron_ffn_reference, neuron_workspace, pack_neurons
from rmuscle_kernels.tiles import INTERPRETER

TILES = INTERPRETER
WIDTH, NEURONS = 64, 160


def layer(random, device, rows, dtype):
    gate, up = (random(NEURONS, WIDTH, scale=WIDTH ** -0.5, dtype=dtype) for _ in range(2))
    down = random(WIDTH, NEURONS, scale=NEURONS ** -0.5, dtype=dtype)
    generator = torch.Generator().manual_seed(3)
    neurons = torch.stack([torch.randperm(NEURONS, generator=generator)[:128] for _ in range(2)])
    return (random(rows, WIDTH, dtype=dtype), *pack_neurons(gate, up, down), neurons.to(torch.int32).to(device),
            random(2, rows, WIDTH, dtype=dtype))


def assert_near(got, expected, tolerance):
    error = (got.float() - expected).abs().max() / expected.abs().max()
    assert error < tolerance, f'relative error {error:.2e}'


@pytest.mark.parametrize('dtype, tolerance', [(torch.bfloat16, 1.5e-2), (torch.float16, 3e-3), (torch.float32, 1e-5)])
@pytest.mark.parametrize('rows, n', [(50, 64), (51, 100), (7, 1), (70, 128)])
def test_matches_the_reference(random, device, slot, dtype, tolerance, rows, n):
    x, gate_up, down_t, neurons, residual = layer(random, device, rows, dtype)
    out = torch.full_like(x, float('nan'))
    got = neuron_ffn(x, gate_up, down_t, neurons, slot, n, residual, out=out, tiles=TILES, impl='triton')
    assert got is out
    assert_near(out, neuron_ffn_reference(x.float(), gate_up.float(), down_t.float(), neurons, slot, n,
                                          residual.float()), tolerance)


def test_all_neurons_equal_the_plain_ffn_and_leave_their_activations(random, device):
    x, gate_up, down_t, _, _ = layer(random, device, 10, torch.float32)
    hidden = torch.nn.functional.gelu(x @ gate_up[:, 0].t(), approximate='tanh') * (x @ gate_up[:, 1].t())
    for impl in ('triton', 'reference'):
        work = neuron_workspace(10, WIDTH, NEURONS, x.dtype, device, tiles=TILES)
        got = neuron_ffn(x, gate_up, down_t, workspace=work, tiles=TILES, impl=impl)
        assert_near(got, hidden @ down_t, 1e-5)
        assert_near(work.hidden[:10, :NEURONS], hidden, 1e-5)


def test_one_workspace_serves_calls_of_different_size_and_is_left_clean(random, device, slot):
    x, gate_up, down_t, neurons, residual = layer(random, device, 50, torch.float32)
    work = neuron_workspace(50, WIDTH, 128, x.dtype, device, tiles=TILES)
    work.hidden.fill_(float('nan'))
    work.partial.fill_(float('nan'))
    for n in (128, 40, 128):
        got = neuron_ffn(x, gate_up, down_t, neurons, slot, n, residual, workspace=work, tiles=TILES, impl='triton')
        assert_near(got, neuron_ffn_reference(x, gate_up, down_t, neurons, slot, n, residual), 1e-5)
        assert not work.arrived.any()
    with pytest.raises(ValueError, match='workspace is too small'):
        neuron_ffn(torch.cat([x, x]), gate_up, down_t, neurons, slot, 128, workspace=work, tiles=TILES, impl='triton')


def test_reads_a_view_of_the_arena(random, device, slot):
    x, gate_up, down_t, neurons, residual = layer(random, device, 8, torch.float32)
    arena = torch.stack([neurons.flip(1), neurons, neurons.flip(0)], dim=1)  # [slots, M, n_mask]
    memory = torch.stack([-residual, residual], dim=1)
    got = neuron_ffn(x, gate_up, down_t, arena[:, 1], slot, 48, memory[:, 1], tiles=TILES, impl='triton')
    assert_near(got, neuron_ffn_reference(x, gate_up, down_t, neurons, slot, 48, residual), 1e-5)
    same = residual[1].expand(2, -1, -1)  # one residual, whatever the slot
    again = neuron_ffn(x, gate_up, down_t, arena[:, 1], slot, 48, same, tiles=TILES, impl='triton')
    assert torch.equal(again, got)


def test_no_neurons_leave_the_residual(random, device, slot):
    x, gate_up, down_t, neurons, residual = layer(random, device, 8, torch.float32)
    assert torch.equal(neuron_ffn(x, gate_up, down_t, neurons, slot, 0, residual, impl='triton'), residual[1])


@pytest.mark.parametrize('change, words', [
    ({'n': 129}, 'n must lie in'), ({'neurons': None, 'n': 5}, 'n must be left out'),
    ({'slot': None}, 'slot must name'),
    ({'residual': torch.zeros(2, 8, 32)}, 'residual must have shape'), ({'down_t': torch.zeros(3, 64)}, 'down_t must'),
])
def test_refuses_what_does_not_fit(change, words):
    good = {'x': torch.zeros(8, 64), 'gate_up': torch.zeros(160, 2, 64), 'down_t': torch.zeros(160, 64),
            'neurons': torch.zeros(2, 128, dtype=torch.int32), 'slot': torch.zeros(1, dtype=torch.int32)}
    with pytest.raises(ValueError, match=words):
        neuron_ffn(**{**good, **change})
