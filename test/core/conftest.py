# SPDX-License-Identifier: Apache-2.0
"""A tiny policy on disk and observations that fit it."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_policy import CAMERAS, JOINTS, OPEN, PROMPT, WAIT_S, run, write_checkpoint

from rmuscle_core.observation import Observation
from rmuscle_core.policy import MusclePolicy


@pytest.fixture(scope='session')
def tiny_checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp('checkpoint'))


@pytest.fixture
def open_policy(tiny_checkpoint):
    """open_policy(settings, library): warmed-up policies that are closed after the test."""
    opened = []

    def make(settings, library=None, checkpoint=tiny_checkpoint, **options):
        opened.append(MusclePolicy.load(checkpoint, settings, library=library, **options))
        opened[-1].warm_up(PROMPT)
        return opened[-1]

    yield make
    assert all(policy.close() for policy in opened)


@pytest.fixture(scope='session')
def look():
    """look(seed, place): an observation; equal places look alike, seeds add a little noise."""
    def make(seed=0, place=0, cameras=CAMERAS):
        scene, noise = np.random.default_rng(place), np.random.default_rng(1000 + seed)
        images = {c: np.clip(scene.integers(0, 200, (32, 32, 3)) + noise.integers(0, 8, (32, 32, 3)), 0, 255)
                  .astype(np.uint8) for c in CAMERAS}
        state = (scene.uniform(-0.8, 0.8, JOINTS) + noise.normal(0, 0.01, JOINTS)).astype(np.float32)
        return Observation({c: images[c] for c in cameras}, state, PROMPT)
    return make


@pytest.fixture
def load(open_policy):
    """load(settings, library, ...): as open_policy."""
    return lambda settings=OPEN, library=None, **options: open_policy(settings, library, **options)


@pytest.fixture
def library(load, look, tmp_path):
    """A library of one episode: places 0, 1, 2."""
    policy = load(library=tmp_path / 'library')
    run(policy, [look(seed=1, place=place) for place in range(3)])
    policy.save_episode(True).result(WAIT_S)
    return tmp_path / 'library'
