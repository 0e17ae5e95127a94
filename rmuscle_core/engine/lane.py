# SPDX-License-Identifier: Apache-2.0
"""A lane: one stream and the programs captured on it. Calls and expansions have a lane each and run side by side.

A program is a body recorded over static buffers; replaying it runs the same operations on what the buffers hold then.
On a CPU nothing is captured: replaying calls the body, which is all that differs.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch

Checkpoint = Callable[[], None]
Body = Callable[[Checkpoint], None]  # gets ``cut``, to be called where the program may be interrupted

PROGRAMS = 64  # kept by a lane; the longest unused goes first, so that tuning ratios for hours fills no memory

log = logging.getLogger(__name__)
_capturing = threading.Lock()  # one capture at a time in the process


def go_on() -> None:
    """The checkpoint of work that nobody interrupts."""


class DirectLane:
    """Runs bodies where they stand: on a CPU, or on a GPU to compare with what is captured."""

    captures = 0

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._bodies: dict[Hashable, Body] = {}

    @property
    def keys(self) -> list[Hashable]:
        """What is recorded."""
        return list(self._bodies)

    def prepare(self, key: Hashable, body: Body) -> None:
        """Record the body under a key if it is not yet."""
        self._bodies.setdefault(key, body)

    def forget(self) -> None:
        """Drop everything recorded."""
        self._bodies.clear()

    def replay(self, key: Hashable, checkpoint: Checkpoint = go_on) -> None:
        """Run what is recorded; checkpoint may raise at a cut to abandon it."""
        self._bodies[key](checkpoint)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Work inside is done on this lane, after what the caller has queued before and before what it queues after."""
        yield

    def paced(self, checkpoint: Checkpoint) -> Checkpoint:
        """A checkpoint for work that is not recorded, which also keeps the device from falling behind it."""
        return checkpoint

    def synchronize(self) -> None:
        """Wait until the lane's work is done."""
        if self.device.type == 'cuda':
            torch.cuda.current_stream(self.device).synchronize()

    def mark(self) -> float:
        return time.perf_counter()

    @staticmethod
    def milliseconds(start: float, end: float) -> float:
        """Time between two marks; the lane must have been synchronised after the second."""
        return 1e3 * (end - start)


class CudaLane:
    """A CUDA stream with a memory pool for its graphs, which therefore may only run one after another, as on a stream.

    priority: of the stream, lower is more urgent (0 is the least); kernels of a graph keep that of their capture.
    """

    def __init__(self, device: torch.device, priority: int) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device, priority=priority)
        self._pool = torch.cuda.graph_pool_handle()
        self._programs: dict[Hashable, list[torch.cuda.CUDAGraph]] = {}
        self.captures = 0  # ever made: one during a call costs it seconds

    @property
    def keys(self) -> list[Hashable]:
        """What is captured."""
        return list(self._programs)

    def prepare(self, key: Hashable, body: Body) -> None:
        """Capture the body under a key if it is not yet. Waits for the lane; other lanes go on."""
        if key in self._programs:
            self._programs[key] = self._programs.pop(key)  # now the last to go
            return
        start = time.perf_counter()
        with _capturing, torch.cuda.stream(self.stream):
            body(go_on)  # compiles kernels and makes library handles, neither of which can be captured
            self.stream.synchronize()
            while len(self._programs) >= PROGRAMS:
                del self._programs[next(iter(self._programs))]
            gc.collect()  # so that nothing is freed inside the capture, which would break it
            self._programs[key] = self._capture(body)
            self.captures += 1
        log.info('captured %s in %.0f ms', key, 1e3 * (time.perf_counter() - start))

    def forget(self) -> None:
        """Drop everything captured, once what is replayed of it is done."""
        self.stream.synchronize()
        with _capturing:
            self._programs.clear()

    def _capture(self, body: Body) -> list[torch.cuda.CUDAGraph]:
        """One graph per stretch between cuts, so that a replay can stop at any of them."""
        graphs: list[torch.cuda.CUDAGraph] = []

        def begin() -> None:
            graphs.append(torch.cuda.CUDAGraph())
            # Only this thread has to keep off what a capture forbids; the other lane's thread works on.
            graphs[-1].capture_begin(pool=self._pool, capture_error_mode='thread_local')

        def cut() -> None:
            graphs[-1].capture_end()
            begin()

        begin()
        try:
            body(cut)
        finally:
            graphs[-1].capture_end()
        return graphs

    def replay(self, key: Hashable, checkpoint: Checkpoint | None = None) -> None:
        """Run what is recorded. With a checkpoint, wait for each stretch and ask before the next."""
        for i, graph in enumerate(self._programs[key]):
            if checkpoint is not None and i:
                self.stream.synchronize()
                checkpoint()
            graph.replay()

    @contextmanager
    def running(self) -> Iterator[None]:
        caller = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(caller)
        with torch.cuda.stream(self.stream):
            yield
        caller.wait_stream(self.stream)

    def paced(self, checkpoint: Checkpoint) -> Checkpoint:
        def wait_and_ask() -> None:
            self.stream.synchronize()
            checkpoint()

        return wait_and_ask

    def synchronize(self) -> None:
        self.stream.synchronize()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event

    @staticmethod
    def milliseconds(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end)


Lane = DirectLane | CudaLane


def make_lanes(device: torch.device) -> tuple[Lane, Lane]:
    """A lane for calls and one, less urgent, for expansions."""
    if device.type == 'cuda':
        return CudaLane(device, -1), CudaLane(device, 0)
    return DirectLane(device), DirectLane(device)
