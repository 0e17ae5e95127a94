# SPDX-License-Identifier: Apache-2.0
"""The simulated tasks that a policy can be evaluated on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np


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


def _transfer_cube(pixels: int) -> Cell:
    from rmuscle_core.workcell.cell import WorkCell

    return WorkCell(pixels)


TASKS = {'transfer_cube': Task('transfer_cube', _transfer_cube)}
