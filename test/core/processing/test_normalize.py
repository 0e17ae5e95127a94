# SPDX-License-Identifier: Apache-2.0
"""Normalisation is invertible, and silent identity (LeRobot's behaviour without statistics) does not happen."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmuscle_core.errors import CheckpointError
from rmuscle_core.processing.normalize import Normalizer, feature_statistics

VALUES = np.random.default_rng(0).normal(3.0, 5.0, (500, 4)).astype(np.float32)
STATISTICS = {f'x.{name}': value for name, value in feature_statistics(VALUES).items()}


@pytest.mark.parametrize('mode', ['QUANTILES', 'QUANTILE10', 'MIN_MAX', 'MEAN_STD', 'IDENTITY'])
def test_inverse(mode):
    normalizer = Normalizer.from_statistics(mode, STATISTICS, 'x', 4)
    np.testing.assert_allclose(normalizer.unnormalize(normalizer.normalize(VALUES)), VALUES, rtol=1e-5, atol=1e-5)


def test_ranges_reach_minus_one_and_one_without_clipping():
    normalizer = Normalizer.from_statistics('QUANTILES', STATISTICS, 'x', 4)
    np.testing.assert_allclose(normalizer.normalize(STATISTICS['x.q01']), -1, atol=1e-6)
    np.testing.assert_allclose(normalizer.normalize(STATISTICS['x.q99']), 1, atol=1e-6)
    assert normalizer.normalize(STATISTICS['x.max'] + 10).min() > 1


@given(st.floats(-1e3, 1e3, width=32))
def test_a_joint_that_never_moved_stays_finite(value):
    flat = {'x.q01': np.zeros(1, np.float32), 'x.q99': np.zeros(1, np.float32)}
    normalizer = Normalizer.from_statistics('QUANTILES', flat, 'x', 1)
    assert np.isfinite(normalizer.normalize(np.array([value]))).all()
    assert normalizer.unnormalize(np.array([value])).shape == (1,)


def test_narrow_dimensions_are_named():
    statistics = {'x.q01': np.array([0, 0.5, -1], np.float32), 'x.q99': np.array([2, 0.5, 1], np.float32)}
    assert Normalizer.from_statistics('QUANTILES', statistics, 'x', 3).narrow() == [1]


@pytest.mark.parametrize('change', [{'x.q99': None}, {'x.q99': np.zeros(3)}, {'x.q01': np.array([0, np.nan, 0, 0])}])
def test_unusable_statistics_are_refused_by_name(change):
    (name,) = change
    statistics = {key: value for key, value in {**STATISTICS, **change}.items() if value is not None}
    with pytest.raises(CheckpointError, match=name.replace('.', r'\.')):
        Normalizer.from_statistics('QUANTILES', statistics, 'x', 4)


def test_unknown_mode_is_refused():
    with pytest.raises(CheckpointError, match='WHITEN'):
        Normalizer.from_statistics('WHITEN', STATISTICS, 'x', 4)


def test_digest_tells_statistics_apart_by_one_ulp():
    changed = {**STATISTICS, 'x.q99': np.nextafter(STATISTICS['x.q99'], np.float32(np.inf))}
    one, same, other = (Normalizer.from_statistics('QUANTILES', s, 'x', 4).digest()
                        for s in (STATISTICS, dict(STATISTICS), changed))
    assert one == same != other
