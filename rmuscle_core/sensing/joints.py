# SPDX-License-Identifier: Apache-2.0
"""Robot joints and policy dimensions: names, order, units, limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rmuscle_core.errors import SettingsError
from rmuscle_core.guard import Limits


@dataclass(frozen=True)
class JointMap:
    """robot = scale * policy + offset, per joint; covers degrees, gripper ranges and their inversion.

    names: ROS joint names in the checkpoint's order. scale, offset: float64 [S].
    """

    names: tuple[str, ...]
    scale: np.ndarray
    offset: np.ndarray
    limits: Limits

    @classmethod
    def build(cls, names: Sequence[str], scale: Sequence[float], offset: Sequence[float], lower: Sequence[float],
              upper: Sequence[float], jump: Sequence[float]) -> JointMap:
        """Check and assemble; a list of one value holds for every joint. Raises SettingsError naming the parameter."""
        if not names:
            raise SettingsError("joint_names is not set; list the joints in the checkpoint's order")
        twice = sorted({name for name in names if list(names).count(name) > 1})
        if twice:
            raise SettingsError(f'joint_names lists {", ".join(twice)} more than once; every joint is needed once')
        given = {'joint_scale': scale, 'joint_offset': offset, 'joint_lower': lower, 'joint_upper': upper,
                 'max_jump': jump}
        arrays = {name: _per_joint(name, values, len(names)) for name, values in given.items()}
        for name in ('joint_scale', 'joint_offset'):
            if not np.isfinite(arrays[name]).all() or (name == 'joint_scale' and not arrays[name].all()):
                raise SettingsError(f'{name} must hold finite{", non-zero" if name == "joint_scale" else ""} numbers, '
                                    f'not {list(given[name])}')
        bad = np.flatnonzero(~(arrays['joint_lower'] < arrays['joint_upper']))
        if len(bad):
            raise SettingsError(f'joint_lower of {names[bad[0]]} must be below its joint_upper, not '
                                f'{arrays["joint_lower"][bad[0]]} and {arrays["joint_upper"][bad[0]]}')
        return cls(tuple(names), arrays['joint_scale'], arrays['joint_offset'],
                   Limits(arrays['joint_lower'], arrays['joint_upper'], arrays['max_jump']))

    def to_policy(self, robot: np.ndarray) -> np.ndarray:
        """[..., S] robot units -> [..., S] the checkpoint's units."""
        return (robot - self.offset) / self.scale

    def to_robot(self, policy: np.ndarray) -> np.ndarray:
        """[..., S] the checkpoint's units -> [..., S] robot units; the exact inverse of to_policy."""
        return np.asarray(policy, dtype=np.float64) * self.scale + self.offset


def _per_joint(name: str, values: Sequence[float], count: int) -> np.ndarray:
    if len(values) not in (1, count):
        raise SettingsError(f'{name} has {len(values)} values, expected one for all joints or {count}, one for each '
                            'of joint_names')
    return np.broadcast_to(np.asarray(values, dtype=np.float64), count).copy()
