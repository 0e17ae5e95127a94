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
    neuron_gate_up_wide: Tile  # for so many neurons that the other would take two waves of programs
    neuron_down: Tile
    qkv: Tile  # of the expert layer, two halves of a head at once, as gate and up
    out: Tile  # of the expert layer, split as neuron_down
    attention: Tile  # queries, head_dim (the kernel takes it from its operands), keys read at a time

    def gate_up_for(self, neurons: int) -> Tile:
        """The tile of the neuron FFN's first launch."""
        one_wave = neurons <= WAVE * self.neuron_gate_up.cols
        return self.neuron_gate_up if one_wave else self.neuron_gate_up_wide

    @property
    def neuron_unit(self) -> int:
        """What the width of a neuron FFN or an expert layer must be a multiple of."""
        return max(self.neuron_gate_up.depth, self.neuron_gate_up_wide.depth, self.qkv.depth, self.neuron_down.cols,
                   self.out.cols)


WAVE = 132  # programs that run at once where each takes a whole multiprocessor
NEURON_GATE_UP = Tile(64, 16, 128, warps=4, stages=3)
NEURON_DOWN = Tile(64, 64, 64, warps=4, stages=4, splits=8)
NEURON_WIDE = Tile(64, 32, 128, warps=4, stages=3)
# 99 KB of shared memory and 255 registers: a deeper geglu tile or a wider attention tile spills. Not measured; fused
# geglu is an argument there: at 1 TB/s, writing gate and up and reading them back costs an eighth of the product
SMALL = Tiles(Tile(128, 128, 32, warps=8, stages=3), NEURON_GATE_UP, NEURON_WIDE, NEURON_DOWN,
              NEURON_GATE_UP, NEURON_DOWN, Tile(64, 256, 32, stages=2))
# measured on an H200: the neuron tiles are the fastest of those in bench/kernel_checks.py, and cuBLAS with an
# elementwise kernel beats every fused geglu
HOPPER = Tiles(None, Tile(64, 16, 256, warps=4, stages=3), NEURON_WIDE,
               Tile(64, 32, 128, warps=4, stages=3, splits=4), Tile(64, 16, 256, warps=4, stages=3),
               Tile(64, 32, 128, warps=4, stages=3, splits=4), Tile(64, 256, 64, stages=2))
# not measured; the widest attention tile that does not spill
TENSOR_MEMORY = Tiles(None, NEURON_GATE_UP, NEURON_WIDE, NEURON_DOWN, NEURON_GATE_UP, NEURON_DOWN,
                      Tile(64, 256, 32, stages=2))
TABLE = {87: SMALL, 89: SMALL, 90: HOPPER, 100: TENSOR_MEMORY, 110: TENSOR_MEMORY,
         120: replace(SMALL, attention=Tile(64, 256, 16, stages=2))}
INTERPRETER = Tiles(Tile(32, 32, 32), Tile(32, 32, 32), Tile(32, 32, 32), Tile(32, 32, 32, splits=3), Tile(32, 16, 32),
                    Tile(32, 32, 32, splits=2), Tile(32, 256, 16))


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
