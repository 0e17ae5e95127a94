# SPDX-License-Identifier: Apache-2.0
"""Robot joints and policy dimensions: names, order, units, limits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rmuscle_core.errors import SettingsError
from rmuscle_core.guard import Limits

UNITS = {'': 1.0, 'same': 1.0, 'deg': math.pi / 180}  # of the policy -> its size in the robot's; '' was not declared
INFINITY = float('inf')


@dataclass(frozen=True)
class JointMap:
    """robot = scale * policy + offset, per joint; covers degrees, gripper ranges and their inversion.

    names: ROS joint names in the checkpoint's order. scale, offset: float64 [S].
    declared: bool [S], whether the user said how the units relate, or nothing was said and they are taken as equal.
    """

    names: tuple[str, ...]
    scale: np.ndarray
    offset: np.ndarray
    limits: Limits
    declared: np.ndarray

    @classmethod
    def build(cls, names: Sequence[str], scale: Sequence[float] = (1.0,), offset: Sequence[float] = (0.0,),
              lower: Sequence[float] = (-INFINITY,), upper: Sequence[float] = (INFINITY,),
              jump: Sequence[float] = (INFINITY,), *, step: Sequence[float] = (INFINITY,), units: Sequence[str] = ('',),
              at_lower: Sequence[float] = (-INFINITY,), at_upper: Sequence[float] = (INFINITY,)) -> JointMap:
        """Check and assemble; a list of one value holds for every joint. Raises SettingsError naming the parameter.

        units: of the policy, see UNITS. at_lower, at_upper: what the policy calls the joint's lower and upper limit,
        in either order; infinite where the unit, scale and offset say it.
        """
        if not names:
            raise SettingsError("joint_names is not set; list the joints in the checkpoint's order")
        twice = sorted({name for name in names if list(names).count(name) > 1})
        if twice:
            raise SettingsError(f'joint_names lists {", ".join(twice)} more than once; every joint is needed once')
        given = {'joint_scale': scale, 'joint_offset': offset, 'joint_lower': lower, 'joint_upper': upper,
                 'max_jump': jump, 'max_step': step, 'policy_at_lower': at_lower, 'policy_at_upper': at_upper}
        arrays = {name: _per_joint(name, values, len(names)) for name, values in given.items()}
        units = _per_joint('joint_units', units, len(names))
        for name in ('joint_scale', 'joint_offset'):
            if not np.isfinite(arrays[name]).all() or (name == 'joint_scale' and not arrays[name].all()):
                raise SettingsError(f'{name} must hold finite{", non-zero" if name == "joint_scale" else ""} numbers, '
                                    f'not {list(given[name])}')
        bad = np.flatnonzero(~(arrays['joint_lower'] < arrays['joint_upper']))
        if len(bad):
            raise SettingsError(f'joint_lower of {names[bad[0]]} must be below its joint_upper, not '
                                f'{arrays["joint_lower"][bad[0]]} and {arrays["joint_upper"][bad[0]]}')
        for name in ('max_jump', 'max_step'):
            if not (arrays[name] > 0).all():
                raise SettingsError(f'{name} must hold positive numbers, not {list(given[name])}; .inf sets no limit')
        scale, offset, declared = _conversion(names, units, arrays)
        limits = Limits(arrays['joint_lower'], arrays['joint_upper'], arrays['max_jump'], arrays['max_step'])
        return cls(tuple(names), scale, offset, limits, declared)

    def to_policy(self, robot: np.ndarray) -> np.ndarray:
        """[..., S] robot units -> [..., S] the checkpoint's units."""
        return (robot - self.offset) / self.scale

    def to_robot(self, policy: np.ndarray) -> np.ndarray:
        """[..., S] the checkpoint's units -> [..., S] robot units; the exact inverse of to_policy."""
        return np.asarray(policy, dtype=np.float64) * self.scale + self.offset

    def unlimited(self) -> tuple[str, ...]:
        """Joints that no max_step holds to a speed."""
        step = np.broadcast_to(self.limits.step, len(self.names))
        return tuple(name for name, most in zip(self.names, step) if not np.isfinite(most))

    def table(self) -> str:
        """One line per joint, for the log: how it is converted and what it may do, in robot units."""
        limits = self.limits
        step = np.broadcast_to(limits.step, len(self.names))
        return '\n'.join(
            f'{name}: robot = {self.scale[i]:g} * policy + {self.offset[i]:g}{"" if self.declared[i] else " (assumed)"}'
            f', limits [{limits.lower[i]:g}, {limits.upper[i]:g}], max_step {step[i]:g}, max_jump {limits.jump[i]:g}'
            for i, name in enumerate(self.names))


def _conversion(names: Sequence[str], units: np.ndarray, arrays: dict[str, np.ndarray],
                ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scale, offset and whether they were declared, from a unit, or from what the policy calls the two limits."""
    unknown = [unit for unit in units if unit not in UNITS]
    if unknown:
        raise SettingsError(f'joint_units must hold {", ".join(unit for unit in UNITS if unit)}, not {unknown[0]!r}; '
                            'for other ranges set policy_at_lower and policy_at_upper')
    given_scale, offset = arrays['joint_scale'], arrays['joint_offset']
    scale = given_scale * np.array([UNITS[unit] for unit in units])
    low, high = arrays['policy_at_lower'], arrays['policy_at_upper']
    ranged = np.isfinite(low) | np.isfinite(high)
    declared = ranged | (units != '') | (given_scale != 1)
    span = arrays['joint_upper'] - arrays['joint_lower']
    for i in np.flatnonzero(ranged):
        if not np.isfinite(low[i] + high[i] + span[i]) or low[i] == high[i]:
            raise SettingsError(f'joint {names[i]}: policy_at_lower {low[i]:g} and policy_at_upper {high[i]:g} need '
                                'each other, to differ, and a finite joint_lower and joint_upper')
        if scale[i] != 1 or offset[i] != 0:
            raise SettingsError(f'joint {names[i]} has policy_at_lower and policy_at_upper as well as joint_units, '
                                'joint_scale or joint_offset; give one of the two')
        scale[i] = span[i] / (high[i] - low[i])
        offset[i] = arrays['joint_lower'][i] - scale[i] * low[i]
    return scale, offset, declared


def _per_joint(name: str, values: Sequence, count: int) -> np.ndarray:
    if len(values) not in (1, count):
        raise SettingsError(f'{name} has {len(values)} values, expected one for all joints or {count}, one for each '
                            'of joint_names')
    kind = object if isinstance(values[0], str) else np.float64
    return np.broadcast_to(np.asarray(values, dtype=kind), count).copy()
