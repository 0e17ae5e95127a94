# SPDX-License-Identifier: Apache-2.0
"""policy_node as a process of its own, and what it takes of the machine."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
# What a life (from one start to the next) may grow by, as a straight line through its samples says.
BOUNDS = {'memory_mb': 48.0, 'threads': 1.0, 'files': 3.0}
SETTLED_S, SHORTEST_S = 90.0, 60.0  # wall time until growth counts, and that a line needs


@dataclass
class Life:
    """One process from start to end. samples: (wall s since start, resident MB, threads, open files)."""

    code: int | None = None
    samples: list[tuple[float, float, int, int]] = field(default_factory=list)

    def growth(self) -> dict[str, float] | None:
        """Growth over this life by a least-squares line; None for a life too short to tell."""
        settled = np.array([sample for sample in self.samples if sample[0] > SETTLED_S], float)
        if len(settled) < 8 or np.ptp(settled[:, 0]) < SHORTEST_S:
            return None
        slopes = np.polyfit(settled[:, 0], settled[:, 1:], 1)[0] * np.ptp(settled[:, 0])
        return dict(zip(BOUNDS, np.round(slopes, 2).tolist()))


class NodeProcess:
    """Starts, signals and samples the node; its output goes to ``log``."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        self._arguments, self.log = arguments, log
        self.lives: list[Life] = []
        self._process: subprocess.Popen | None = None
        self._since = 0.0

    def start(self) -> None:
        """Begin a life."""
        command = [sys.executable, str(ROOT / 'rmuscle_ros/scripts/policy_node'), '--ros-args', *self._arguments]
        with self.log.open('a') as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        self.lives.append(Life())
        self._since = time.monotonic()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def code(self, timeout_s: float) -> int | None:
        """Wait for the end; its exit code, or None when it does not come (it is killed then)."""
        try:
            self.lives[-1].code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return None
        return self.lives[-1].code

    def sample(self) -> None:
        """Note memory, threads and open files."""
        folder = Path('/proc') / str(self.pid)
        try:
            lines = (folder / 'status').read_text().splitlines()
            told = dict(line.split(':', 1) for line in lines if ':' in line)
            self.lives[-1].samples.append((time.monotonic() - self._since, int(told['VmRSS'].split()[0]) / 1024,
                                           int(told['Threads']), len(list((folder / 'fd').iterdir()))))
        except (OSError, KeyError):
            pass  # it has just ended

    def tracebacks(self) -> list[str]:
        """The last line of every traceback in the log: a failure that nobody foresaw."""
        found, inside = [], False
        for line in self.log.read_text(errors='replace').splitlines():
            if 'Traceback (most recent call last)' in line:
                inside = True
            elif inside and line and not line.startswith(' '):
                inside = False
                found.append(line)
        return found
