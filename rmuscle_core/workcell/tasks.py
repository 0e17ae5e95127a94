# SPDX-License-Identifier: Apache-2.0
"""The simulated tasks that a policy can be evaluated on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from rmuscle_core.workcell.demonstrations import Teacher


class Cell(Protocol):
    """A simulated workstation. The episode a seed gives depends on nothing else."""

    task: str  # the prompt
    cameras: tuple[str, ...]
    joints: tuple[str, ...]  # of state and command alike
    control_rate: float  # Hz
    episode_steps: int  # control periods after which an episode has failed

    def reset(self, seed: int) -> None: ...

    def state(self) -> np.ndarray:
        """Measured joint positions, float32 [joints]."""

    def images(self) -> dict[str, np.ndarray]:
        """{camera: uint8 [pixels, pixels, 3] RGB}."""

    def step(self, command: np.ndarray) -> bool:
        """Execute one command [joints] for a control period; return whether the task was accomplished in it."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Task:
    """policy: folder of the shipped policy in config/policy. make_cell(pixels) imports the simulator."""

    policy: str
    make_cell: Callable[[int], Cell]
    make_teacher: Callable[[Cell], Teacher]


def _transfer_cube(pixels: int) -> Cell:
    from rmuscle_core.workcell.cell import WorkCell

    return WorkCell(pixels)


def _transfer_cube_teacher(cell: Cell) -> Teacher:
    from rmuscle_core.workcell.expert import TransferTeacher

    return TransferTeacher(cell)


def _pick_place(pixels: int) -> Cell:
    from rmuscle_core.workcell.pick_place import PickPlaceCell

    return PickPlaceCell(pixels)


def _pick_place_teacher(cell: Cell) -> Teacher:
    from rmuscle_core.workcell.pick_place_expert import PickPlaceTeacher

    return PickPlaceTeacher(cell)


TASKS = {
    'transfer_cube': Task('transfer_cube', _transfer_cube, _transfer_cube_teacher),
    'pick_place': Task('pick_place', _pick_place, _pick_place_teacher),
}
