# SPDX-License-Identifier: Apache-2.0
"""Compacted neurons: copies, and what an FFN makes of them."""

from __future__ import annotations

import pytest
import torch

from rmuscle_kernels.compact import compact_neurons
from rmuscle_kernels.neurons import neuron_ffn_reference


def layer(random, device, width=24, total=20, masked=13):
    generator = torch.Generator().manual_seed(3)
    arena = torch.stack([torch.randperm(total, generator=generator)[:masked] for _ in range(2 * 3 * 2)])
    arena = arena.view(2, 3, 2, masked).to(torch.int32).to(device)  # [slots, G, M, n_mask]
    return random(total, 2, width, dtype=torch.bfloat16), random(total, width, dtype=torch.bfloat16), arena[:, :, 1]


@pytest.mark.parametrize('impl', ['triton', 'reference'])
@pytest.mark.parametrize('n', [0, 1, 13])
def test_is_a_copy_of_what_the_slot_names(random, device, slot, impl, n):
    gate_up, down_t, neurons = layer(random, device)
    out = gate_up.new_full((3, n, 2, 24), float('nan')), gate_up.new_full((3, n, 24), float('nan'))
    assert compact_neurons(gate_up, down_t, neurons, slot, n, out=out, impl=impl) is out
    for group in range(3):
        for place, neuron in enumerate(neurons[1, group, :n].tolist()):
            assert torch.equal(out[0][group, place], gate_up[neuron])
            assert torch.equal(out[1][group, place], down_t[neuron])


def test_an_ffn_over_the_copy_equals_the_one_that_gathers(random, device, slot):
    gate_up, down_t, neurons = (t.float() if t.is_floating_point() else t for t in layer(random, device))
    x = random(7, 24)
    compacted = compact_neurons(gate_up, down_t, neurons, slot, 9, impl='triton')
    torch.testing.assert_close(neuron_ffn_reference(x, compacted[0][2], compacted[1][2]),
                               neuron_ffn_reference(x, gate_up, down_t, neurons[:, 2], slot, 9))


@pytest.mark.parametrize('change, words', [({'n': 14}, 'n must lie in'),
                                           ({'down_t': torch.zeros(24, 20).t()}, 'contiguous'),
                                           ({'neurons': torch.zeros(2, 13, dtype=torch.int32)}, 'neurons must have')])
def test_refuses_what_does_not_fit(change, words):
    good = {'gate_up': torch.zeros(20, 2, 24), 'down_t': torch.zeros(20, 24),
            'neurons': torch.zeros(2, 3, 13, dtype=torch.int32), 'slot': torch.zeros(1, dtype=torch.int32), 'n': 3}
    with pytest.raises(ValueError, match=words):
        compact_neurons(**{**good, **change})
