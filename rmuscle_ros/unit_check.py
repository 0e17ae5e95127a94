# SPDX-License-Identifier: Apache-2.0
"""The first joint positions of a run are compared with what the checkpoint was trained on, before anything moves."""

from __future__ import annotations

from typing import Any

import numpy as np

from rmuscle_core.errors import ObservationError
from rmuscle_core.sensing.joints import JointMap


class UnitCheck:
    """Passes once per run. Joints whose unit the user declared are not questioned."""

    def __init__(self, policy: Any, joints: JointMap):
        self._policy, self._joints, self._passed = policy, joints, False

    def restart(self) -> None:
        """The next positions are the first of a run."""
        self._passed = False

    def check(self, measured: np.ndarray | None) -> None:
        """measured: [S] robot units, or None where nothing is known yet.

        Raises ObservationError when they cannot be meant in the checkpoint's units.
        """
        if self._passed or measured is None:
            return
        joints = self._joints
        problem = self._policy.unit_problem(joints.to_policy(measured), joints.names, joints.declared)
        if problem:
            raise ObservationError(problem)
        self._passed = True
