# SPDX-License-Identifier: Apache-2.0
"""Each step undoes itself, and a recipe undoes all of them in reverse."""

from __future__ import annotations

import numpy as np
import pytest

from rmuscle_core.processing.normalize import Normalizer
from rmuscle_core.processing.prompt import PromptRule
from rmuscle_core.processing.recipe import Recipe
from rmuscle_core.processing.steps import BOUND, AlohaSpace, Normalization, Padding, RelativeActions
from rmuscle_core.processing.views import Views

RANDOM = np.random.default_rng(3)
LOW, HIGH = RANDOM.uniform(-2, 0, 14).astype(np.float32), RANDOM.uniform(1, 2, 14).astype(np.float32)
MASK = np.array([1, 1, 1, 1, 1, 1, 0] * 2, np.float32)


def scale(mode: str, origin: str = 'lerobot') -> Normalizer:
    return Normalizer(mode, LOW, HIGH, 1e-6 if origin == 'openpi' else 1e-8, origin)


STEPS = {'aloha': AlohaSpace(), 'relative': RelativeActions(MASK), 'padding': Padding(32, 14),
         **{f'{mode} {origin}': Normalization(scale(mode, origin), scale(mode, origin))
            for mode in ('QUANTILES', 'MIN_MAX', 'MEAN_STD', 'IDENTITY') for origin in ('lerobot', 'openpi')}}
STATE = RANDOM.uniform(0.1, 1, 14).astype(np.float32)
CHUNK = RANDOM.uniform(-1, 1, (5, 14)).astype(np.float32)


@pytest.mark.parametrize('name', STEPS)
def test_each_step_has_an_inverse(name):
    step = STEPS[name]
    back = step.to_robot(step.to_policy(CHUNK.copy(), STATE), STATE)
    assert back.dtype == np.float32
    np.testing.assert_allclose(back, CHUNK, atol=2e-6)
    assert step.forward(STATE.copy()).dtype == np.float32


def recipe(*steps) -> Recipe:
    return Recipe(Views(('top',), 32), steps, PromptRule('pi05', 100), 'test')


def test_a_recipe_inverts_its_steps_in_reverse_and_anchors_each_on_the_state_it_saw():
    relative = RelativeActions(MASK)
    made = recipe(AlohaSpace(), relative, Normalization(scale('QUANTILES'), scale('QUANTILES')), Padding(32, 14))
    policy = made.to_policy(CHUNK, STATE)
    assert policy.shape == (5, 32) and not policy[:, 14:].any()
    np.testing.assert_allclose(made.to_robot(policy, STATE), CHUNK, atol=5e-6)
    # the anchor is the state after the joints were turned, as in openpi
    by_hand = scale('QUANTILES').unnormalize(policy[:, :14]) + AlohaSpace().forward(STATE) * MASK
    np.testing.assert_allclose(AlohaSpace().to_robot(by_hand, STATE), CHUNK, atol=5e-6)


def test_i12_still_dimensions_are_bounded_and_others_never_clipped():
    low, high = np.array([0, 0.5], np.float32), np.array([1, 0.5], np.float32)
    step = Normalization(Normalizer('QUANTILES', low, high), Normalizer('QUANTILES', low, high))
    assert step.forward(np.array([50, 0.5], np.float32)).tolist() == [99, -1]
    assert step.forward(np.array([50, 0.6], np.float32)).tolist() == [99, BOUND]
    assert step.forward(np.array([50, 0.4], np.float32)).tolist() == [99, -BOUND]


def test_a_shorter_state_anchors_the_dimensions_it_has():
    step = RelativeActions(np.ones(4, np.float32))
    assert step.to_robot(np.zeros((2, 4), np.float32), np.array([1, 2], np.float32)).tolist() == [[1, 2, 0, 0]] * 2
