# SPDX-License-Identifier: Apache-2.0
"""What a call costs under each plan, measured here or predicted for another device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch

from rmuscle_core.bench.roofline import Peaks, floors
from rmuscle_core.engine.plan import CallPlan
from rmuscle_core.policy import MusclePolicy
from rmuscle_core.processing import ModelInputs

_Result = TypeVar('_Result')


class Cost:
    """Milliseconds of a call under each plan: predicted where peaks are given, else the median of what every run took
    (on a CPU in CPU time). The plans take turns, so that a busy minute of the machine falls on all of them."""

    def __init__(self, policy: MusclePolicy, inputs: ModelInputs, peaks: Peaks | None) -> None:
        self._policy, self._peaks = policy, peaks
        self._text = policy.engine.embed(inputs).text
        self._taken: dict[CallPlan, list[float]] = {}
        self._embedding: list[float] = []
        self._clock = time.process_time if policy.engine.device.type == 'cpu' else time.perf_counter

    def run(self, plan: CallPlan, work: Callable[[], _Result]) -> _Result:
        if self._peaks is None and plan not in self._taken:
            work()  # the first run of a plan also prepares it
        result, taken = self._timed(work)
        self._taken.setdefault(plan, []).append(taken)
        return result

    def run_dense(self, inputs: ModelInputs) -> None:
        """Embedding is the same for every setting and counts for each, or ratios would look better than they are."""
        if self._peaks is None:
            embedded, taken = self._timed(lambda: self._policy.engine.embed(inputs))
            self._embedding.append(taken)
            self.run(CallPlan(), lambda: self._policy.engine.act(embedded, CallPlan(), None))

    def of(self, plan: CallPlan) -> float:
        if self._peaks is not None:
            return self._predict(plan)
        return float(np.median(self._taken[plan]) + np.median(self._embedding))

    def _timed(self, work: Callable[[], _Result]) -> tuple[_Result, float]:
        start = self._clock()
        result = work()
        return result, 1e3 * (self._clock() - start)

    def _predict(self, plan: CallPlan) -> float:
        config = self._policy.config
        element = torch.empty(0, dtype=config.compute_dtype).element_size()
        return floors(config, len(self._policy.cameras), self._text, plan, element, self._peaks)['total']
