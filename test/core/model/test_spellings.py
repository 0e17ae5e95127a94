# SPDX-License-Identifier: Apache-2.0
"""From raw pictures to robot units: equal to LeRobot, however the checkpoint is spelled."""

from __future__ import annotations

import numpy as np
import pytest
from parity_copies import NAMES, PARITY, SPELLINGS, act, as_openpi, copy_of, reference_of

# in robot units, where LeRobot's own kernels differ by as much between machines
LIMITS = {'tiny_pi05_float32': 2e-6, 'tiny_pi0_float32': 4e-6, 'tiny_pi05_bfloat16': 1.5e-2}


@pytest.mark.parametrize('item', [0, 1])
@pytest.mark.parametrize('name', NAMES)
def test_raw_observations_give_lerobots_actions(name, item):
    reference = reference_of(name)
    actions = act(PARITY / name, reference, item)
    assert np.abs(actions - reference['actions_unnormalized'][item]).max() < LIMITS[name]


@pytest.mark.parametrize('spelling', SPELLINGS, ids=lambda spelling: spelling.__name__)
@pytest.mark.parametrize('name', NAMES)
def test_every_spelling_acts_the_same_bit_for_bit(name, spelling, tmp_path):
    reference = reference_of(name)
    copy = copy_of(name, tmp_path)
    spelling(copy)
    assert np.array_equal(act(copy, reference, 0), act(PARITY / name, reference, 0))


@pytest.mark.parametrize('name', NAMES[:2])
def test_the_same_network_in_openpis_layout_acts_by_openpis_rules(name, tmp_path):
    reference, kind = reference_of(name), name.split('_')[1]
    copy = as_openpi(copy_of(name, tmp_path), kind)
    # LeRobot's resize and statistics' epsilons differ from openpi's, by little on these pictures
    difference = np.abs(act(copy, reference, 0) - act(PARITY / name, reference, 0)).max()
    assert 0 < difference < 0.5
