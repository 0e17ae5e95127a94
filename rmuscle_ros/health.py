# SPDX-License-Identifier: Apache-2.0
"""How the policy calls are doing: durations, deadlines, reuse; and ~/status, which tells it."""

from __future__ import annotations

import math
import time
from collections import deque
from typing import Any

import numpy as np

from rmuscle.msg import NodeStatus
from rmuscle_core.observation import CallReport
from rmuscle_ros.publish import ChunkPublisher
from rmuscle_ros.worker import InferenceWorker

RECENT = 500  # calls that percentiles and shares are taken over
NAN = math.nan


class Health:
    """Written on the inference thread (``stalled`` on the executor's), read by the heartbeat and the diagnostics.

    deadline_s: how long the executed steps of a chunk last. A call that takes longer leaves the robot waiting, however
    early it starts.
    """

    def __init__(self, deadline_s: float):
        self.deadline_s = deadline_s
        self.waiting_for = ''  # what the next call waits for
        self.refusal = ''  # kind of the last chunk's refusal; empty since one was published
        self.stalled = False
        self.episode = self.deadline_misses = 0
        self.path = ''
        self._durations_ms: deque[float] = deque(maxlen=RECENT)
        self._reused: deque[tuple[float, float]] = deque(maxlen=RECENT)  # shares of tokens and of neurons
        self._chunk_at: float | None = None

    def call_returned(self, report: CallReport) -> None:
        """Note a call."""
        self.path, duration_ms = report.path, report.milliseconds.get('total', NAN)
        self._durations_ms.append(duration_ms)
        self._reused.append((1 - report.tokens_recomputed / report.tokens if report.tokens else 0.0,
                             1 - report.neurons_evaluated / report.neurons if report.neurons else 0.0))
        self.deadline_misses += self.late

    def chunk_published(self) -> None:
        """Note that the last call's answer went out."""
        self._chunk_at, self.refusal = time.monotonic(), ''

    @property
    def call_ms(self) -> float:
        """Duration of the last call; NaN before the first."""
        return self._durations_ms[-1] if self._durations_ms else NAN

    @property
    def late(self) -> bool:
        """The last call took longer than the deadline."""
        return self.call_ms > 1e3 * self.deadline_s

    def timing(self) -> dict[str, float]:
        """Percentiles of the recent calls' durations, missed deadlines, and the age of the last chunk."""
        durations = list(self._durations_ms)  # a copy: another thread appends
        p50, p99 = np.percentile(durations, (50, 99)).tolist() if durations else (NAN, NAN)
        age_s = NAN if self._chunk_at is None else time.monotonic() - self._chunk_at
        return {'call_p50_ms': p50, 'call_p99_ms': p99, 'deadline_s': self.deadline_s,
                'deadline_misses': self.deadline_misses, 'chunk_age_s': age_s}

    def reuse(self) -> dict[str, float]:
        """Mean shares of the recent calls' tokens and neurons that were taken from a reference."""
        reused = list(self._reused)
        tokens, neurons = np.mean(reused, axis=0).tolist() if reused else (NAN, NAN)
        return {'tokens_reused_ratio': tokens, 'neurons_reused_ratio': neurons}


def status_message(health: Health | None, worker: InferenceWorker | None, output: ChunkPublisher | None,
                   **told: Any) -> NodeStatus:
    """The heartbeat; ``told`` are the fields a node has in every state, the rest is None until it is configured."""
    message = NodeStatus(call_ms=NAN, policy_latency_s=NAN, **told)
    if health is not None:
        message.waiting_for = health.waiting_for if worker.running else ''
        message.running, message.stalled, message.call_age_s = worker.running, health.stalled, worker.call_age_s()
        message.episode, message.deadline_misses, message.path = health.episode, health.deadline_misses, health.path
        message.calls, message.calls_dropped = worker.calls, worker.discarded
        message.chunks_published, message.chunks_refused = output.published, sum(output.refused.values())
        message.values_clamped, message.call_ms = output.clamped, health.call_ms
        message.policy_latency_s = output.latency_s
    return message
