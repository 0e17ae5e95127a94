# SPDX-License-Identifier: Apache-2.0
"""``rmuscle bench --reconstruct``: does expanding references between calls make the calls themselves slower?"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rmuscle_core.bench.calls import Variant, call, expand
from rmuscle_core.library import Reference, ReferenceId
from rmuscle_core.processing import ModelInputs
from rmuscle_core.reconstruct import Reconstructor

REST = 2.3  # rest between calls in expansions: a call then falls into the middle of the third


@dataclass
class Interference:
    """Milliseconds of calls with the reconstructor idle and at work before them; what it expanded in that time.

    idle_cpu, working_cpu: the same calls in time that their thread had a CPU, which other programs' load leaves alone.
    """

    idle: list[float] = field(default_factory=list)
    working: list[float] = field(default_factory=list)
    idle_cpu: list[float] = field(default_factory=list)
    working_cpu: list[float] = field(default_factory=list)
    expanded: int = 0
    interrupted: int = 0
    seconds: float = 0.0

    @property
    def entries_per_second(self) -> float:
        return self.expanded / self.seconds


def measure_interference(variant: Variant, reference: Reference, spare_slot: int, inputs: ModelInputs, rounds: int,
                         progress: Callable[[], object] = lambda: None) -> Interference:
    """Alternate calls after a rest and calls that interrupt an expansion into a slot they do not read.

    As in the policy, a call's clock runs from before it asks the reconstructor to yield.
    """
    def expand_next(identity: ReferenceId, wanted: Sequence[ReferenceId], checkpoint: Callable[[], None]) -> bool:
        expand(variant.engine, reference, spare_slot, variant.plan, checkpoint)
        return True

    expand(variant.engine, reference, spare_slot, variant.plan)  # the first one also captures and compiles
    start = time.perf_counter()
    expand(variant.engine, reference, spare_slot, variant.plan)
    rest = REST * (time.perf_counter() - start)
    result, pause = Interference(), threading.Event()
    reconstructor = Reconstructor(expand_next)
    try:
        for number in range(2 * rounds):
            working = number % 4 in (1, 2)  # idle, working, working, idle: a drift meets both alike
            if working:
                reconstructor.open_interval([reference.id] * 1000, float('inf'), 1000)
            pause.wait(rest)
            start, cpu = time.perf_counter(), time.thread_time()
            with reconstructor.policy_call():
                call(variant, inputs)
            (result.working_cpu if working else result.idle_cpu).append(1e3 * (time.thread_time() - cpu))
            (result.working if working else result.idle).append(1e3 * (time.perf_counter() - start))
            result.seconds += rest * working
            progress()
    finally:
        reconstructor.close()
    result.expanded, result.interrupted = reconstructor.expanded, reconstructor.interrupted
    return result
