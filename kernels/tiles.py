# SPDX-License-Identifier: Apache-2.0
"""Launch shapes per GPU architecture: a table in place of autotuning, so that nothing is timed at start-up.

Keys are compute capabilities times ten; a GPU that is not listed takes the nearest one below. Every row is compiled
for its architecture in test/kernels/test_aot.py (no spills, tensor cores used).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch


@dataclass(frozen=True)
class Tile:
    """One program computes [rows, cols], reading depth at a time; splits programs share one output tile."""

    rows: int
    cols: int
    depth: int
    warps: int = 4
    stages: int = 3
    splits: int = 1
    descriptors: bool = False  # read weights through TMA; Hopper and later

    @property
    def launch(self) -> dict[str, int]:
        return {'num_warps': self.warps, 'num_stages': self.stages}


@dataclass(frozen=True)
class Tiles:
    """The tiles of one architecture."""

    geglu: Tile | None  # two accumulators, gate and up; None where cuBLAS and an elementwise kernel are faster
    neuron_gate_up: Tile
    neuron_down: Tile
    attention: Tile  # queries, head_dim (the kernel takes it from its operands), keys read at a time


NEURON_GATE_UP = Tile(64, 16, 128, warps=4, stages=3)
NEURON_DOWN = Tile(64, 64, 64, warps=4, stages=4, splits=8)
# 99 KB of shared memory and 255 registers: a deeper tile spills
SMALL = Tiles(Tile(128, 128, 32, warps=8, stages=3), NEURON_GATE_UP, NEURON_DOWN, Tile(64, 256, 32, stages=2))
LARGE = Tiles(Tile(128, 128, 64, warps=8, stages=3), NEURON_GATE_UP, NEURON_DOWN, Tile(64, 256, 64, stages=2))
# the widest attention tiles that do not spill
TENSOR_MEMORY = replace(LARGE, attention=Tile(64, 256, 32, stages=2))
TABLE = {87: SMALL, 89: SMALL, 90: LARGE, 100: TENSOR_MEMORY, 110: TENSOR_MEMORY,
         120: replace(SMALL, attention=Tile(64, 256, 16, stages=2))}
INTERPRETER = Tiles(Tile(32, 32, 32), Tile(32, 32, 32), Tile(32, 32, 32, splits=3), Tile(32, 256, 16))


def tiles_for(device: torch.device) -> Tiles:
    """Return the tiles of this device; CPU tensors get the interpreter's."""
    return capability_tiles(_capability(device.index)) if device.type == 'cuda' else INTERPRETER


def capability_tiles(capability: int) -> Tiles:
    """Return the row of the table for a compute capability times ten."""
    return TABLE[max((key for key in TABLE if key <= capability), default=min(TABLE))]


@lru_cache
def _capability(index: int | None) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor
