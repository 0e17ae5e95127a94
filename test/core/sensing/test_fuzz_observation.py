# SPDX-License-Identifier: Apache-2.0
"""A few hundred hostile messages of each kind; bench/fuzz holds what makes them, for longer runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

hypothesis = pytest.importorskip('hypothesis')
PATH = Path(__file__).resolve().parents[3] / 'bench/fuzz/observation.py'
SPEC = importlib.util.spec_from_file_location('fuzz_observation', PATH)
fuzz = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(fuzz)


@pytest.mark.filterwarnings('error')
@pytest.mark.parametrize('target', fuzz.targets())
@hypothesis.settings(max_examples=300, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(seed=hypothesis.strategies.integers(0, 2**64 - 1))
def test_used_rightly_or_refused_in_one_sentence(target, seed):
    fuzz.targets()[target](fuzz.random.Random(seed))
