# SPDX-License-Identifier: Apache-2.0
"""Success rates and their uncertainty, against values computed elsewhere."""

import pytest

from rmuscle_core.evaluation.statistics import mcnemar, paired_difference, wilson_interval


@pytest.mark.parametrize(('successes', 'low', 'high'), [(0, 0.0, 0.1611), (10, 0.2993, 0.7007), (20, 0.8389, 1.0)])
def test_wilson_interval(successes, low, high):
    assert wilson_interval(successes, 20) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize(('only_first', 'only_second', 'p'), [
    (0, 0, 1.0), (5, 0, 0.0625), (1, 9, 0.02148), (6, 6, 1.0)])
def test_mcnemar_is_the_binomial_test_of_differing_pairs(only_first, only_second, p):
    both = [True] * 7
    first = [True] * only_first + [False] * only_second + both
    second = [False] * only_first + [True] * only_second + both
    assert mcnemar(first, second) == (only_first, only_second, pytest.approx(p, abs=1e-5))


def test_pairs_need_equal_lengths():
    with pytest.raises(ValueError, match='not 1 and 2'):
        mcnemar([True], [True, False])


def test_paired_difference_is_signed_and_never_without_an_interval():
    change, low, high = paired_difference([True] * 10, [True] * 8 + [False] * 2)
    assert change == pytest.approx(-0.2) and low < -0.2 < high
    change, low, high = paired_difference([True] * 50, [True] * 50)
    assert change == 0 and low == pytest.approx(-high) and 0 < high < 0.1
