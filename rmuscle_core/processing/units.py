# SPDX-License-Identifier: Apache-2.0
"""Degrees or radians? The training statistics and a first state tell, where the user did not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rmuscle_core.processing.normalize import Normalizer

TURN = 2 * np.pi
FAR = 3.0  # training ranges between their middle and a state that cannot be meant


def unit_problem(state: np.ndarray, statistics: Normalizer, names: Sequence[str], declared: np.ndarray) -> str:
    """Why a robot's first state [S], in the units the policy would be given, is not in those it was trained in.

    declared: bool [S], joints whose unit is known and not questioned. Empty when nothing is wrong.

    Radians in a checkpoint of degrees lie well inside its range, so there the ranges are judged: angles beyond two
    turns are no radians. It takes half of the joints, since a gripper may count to 100 in any unit.
    """
    if statistics.mode == 'IDENTITY':
        return ''
    low, high = statistics.limits()
    turning = (np.maximum(np.abs(low), np.abs(high)) > 2 * TURN) & ~declared
    if 2 * np.count_nonzero(turning) >= len(state) and (np.abs(state[turning]) <= TURN).all():
        i = int(np.flatnonzero(turning)[0])
        return (f'the checkpoint looks like degrees: joint {names[i]} was trained on {low[i]:.4g} to {high[i]:.4g}, '
                f'the robot reports {state[i]:.4g}; set joint_units to deg, or to same if joint_states are in degrees')
    span = high - low
    questioned = ~declared & ~np.isin(np.arange(len(state)), statistics.narrow())
    far = np.flatnonzero((np.abs(state - (low + high) / 2) > FAR * span) & questioned)
    if not len(far):
        return ''
    i = int(far[0])
    looks = 'looks like degrees' if abs(state[i]) > 2 * TURN else 'looks like another unit or another joint'
    return (f'joint {names[i]} {looks}: the robot reports {state[i]:.4g}, the checkpoint was trained on {low[i]:.4g} '
            f'to {high[i]:.4g}; correct joint_units, joint_scale or the order of joint_names, or set joint_units to '
            'same to say that this is right')
