# SPDX-License-Identifier: Apache-2.0
"""Comparing durations on a machine that is not quiet."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

# A measured piece of work; it may return its own split in milliseconds per stage.
Work = Callable[[], 'dict[str, float] | None']


@dataclass
class Comparison:
    """milliseconds: work -> all samples. stages: work -> stage -> samples. speedups: variant -> one per round.

    cpu_speedups: the same in time spent on the CPU, which other programs' load leaves alone; says nothing about work
    done on a GPU.
    """

    milliseconds: dict[str, list[float]]
    stages: dict[str, dict[str, list[float]]]
    speedups: dict[str, list[float]]
    cpu_speedups: dict[str, list[float]]

    @classmethod
    def of(cls, names: list[str]) -> Comparison:
        return cls({n: [] for n in names}, {n: {} for n in names}, {n: [] for n in names}, {n: [] for n in names})


def interleave(baseline: str, works: Mapping[str, Work], rounds: int, *, warm_up: int = 1,
               synchronize: Callable[[], None] | None = None, progress: Callable[[], object] = lambda: None,
               ) -> Comparison:
    """Run baseline, variant, baseline, next variant, baseline, ... for some rounds.

    Each variant's speedup is the mean of the baseline runs just before and after it over its own time, so that
    clocks and other load that drift slower than one call cancel. Warm-up rounds are not kept.
    """
    variants = [name for name in works if name != baseline]
    result = Comparison.of(list(works))
    for number in range(warm_up + rounds):
        kept = result if number >= warm_up else Comparison.of(list(works))
        before = _run(baseline, works, kept, synchronize)
        for name in variants:
            own = _run(name, works, kept, synchronize)
            after = _run(baseline, works, kept, synchronize)
            for ratios, a, b, c in zip((kept.speedups, kept.cpu_speedups), before, own, after):
                ratios[name].append((a + c) / 2 / b)
            before = after
        progress()
    return result


def _run(name: str, works: Mapping[str, Work], kept: Comparison,
         synchronize: Callable[[], None] | None) -> tuple[float, float]:
    """Run one work and keep its times; milliseconds that passed and that the CPU spent."""
    start, cpu = time.perf_counter(), time.process_time()
    stages = works[name]()
    if synchronize:
        synchronize()
    elapsed, cpu = 1e3 * (time.perf_counter() - start), 1e3 * (time.process_time() - cpu)
    kept.milliseconds[name].append(elapsed)
    for stage, milliseconds in (stages or {}).items():
        kept.stages[name].setdefault(stage, []).append(milliseconds)
    return elapsed, cpu


def summary(values: list[float]) -> dict[str, float]:
    """Median, 95th percentile, quartiles and number of samples, rounded for reading."""
    low, median, high, p95 = np.percentile(values, [25, 50, 75, 95])
    return {'p50': round(float(median), 4), 'p95': round(float(p95), 4), 'q25': round(float(low), 4),
            'q75': round(float(high), 4), 'n': len(values)}


def synchronizer(device: torch.device) -> Callable[[], None] | None:
    """What waits for the device's queued work; None where there is no queue."""
    return (lambda: torch.cuda.synchronize(device)) if device.type == 'cuda' else None
