# SPDX-License-Identifier: Apache-2.0
"""Neurons by step and layer: the ratio on average, tilted, never between a reference's ranking and all."""

from itertools import product

import pytest

from rmuscle_core.engine.plan import CallPlan, group_steps
from rmuscle_core.engine.spread import even, neuron_count, spread

N, LAYERS = 4000, 18
STEPS = group_steps(10, 5)


def share(counts, steps=STEPS, neurons=N):
    weighted = sum(count * sum(row) for count, row in zip(steps, counts))
    return weighted / (sum(steps) * len(counts[0]) * neurons)


@pytest.mark.parametrize(('ratio', 'step_tilt', 'layer_tilt', 'limit'), list(product(
    (0.05, 0.35, 0.5, 0.75), (0.0, 0.4, 0.9), (0.0, 0.3, 0.9), (0.6, 0.75, 1.0))))
def test_a_call_costs_what_its_ratio_says_and_never_asks_for_what_no_reference_ranks(ratio, step_tilt, layer_tilt,
                                                                                    limit):
    counts = spread(ratio, N, limit, STEPS, LAYERS, step_tilt, layer_tilt)
    ranked = neuron_count(limit, N)
    assert all(1 <= count <= ranked or count == N for row in counts for count in row)
    rounding = 64 / N + 1 / N
    assert share(counts) <= ratio + rounding
    jump = (1 - limit) / (2 if layer_tilt == 0 else 2 * LAYERS)  # a group, or a layer of it, passes the limit at once
    assert share(counts) >= min(ratio, limit) - jump


def test_late_steps_and_early_layers_have_more():
    counts = spread(0.4, N, 1.0, (5, 5), 4, 0.4, 0.3)
    assert all(early < late for early, late in zip(*counts))
    for row in counts:
        assert sorted(row, reverse=True) == list(row) and row[0] > row[-1]


def test_without_tilt_all_have_the_same_up_to_what_a_reference_ranks():
    assert spread(0.35, 512, 0.75, STEPS, 6, 0.0, 0.0) == even(180, 2, 6)
    assert spread(0.9, 512, 0.75, STEPS, 6, 0.0, 0.0) == even(384, 2, 6)


@pytest.mark.parametrize('tilt', [0.0, 0.9])
def test_a_ratio_of_one_is_every_neuron(tilt):
    assert spread(1.0, 512, 0.75, STEPS, 6, tilt, tilt) == even(512, 2, 6)


def test_groups_count_by_their_steps():
    steps = group_steps(10, 4)
    assert steps == (4, 4, 2)
    counts = spread(0.4, N, 1.0, steps, 6, 0.8, 0.0)
    assert abs(share(counts, steps) - 0.4) < 0.02
    plan = CallPlan(neurons=counts)
    assert abs(plan.mean_neurons(N, 10, 4) - share(counts, steps) * N) <= 1
