# SPDX-License-Identifier: Apache-2.0
"""The thread that expands likely references while the robot executes a chunk.

A published chunk opens an interval; the next policy call closes it. Inside it candidates are expanded in order
of likelihood. A call that is due stops the expansion at the next layer boundary; other work (writing an episode)
only pauses there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

from rmuscle_core.errors import EpisodeError, LibraryError
from rmuscle_core.ffn import Interrupted
from rmuscle_core.library import ReferenceId

log = logging.getLogger(__name__)

Expand = Callable[[ReferenceId, Sequence[ReferenceId], Callable[[], None]], bool]


class Reconstructor:
    """Runs ``expand(reference_id, wanted, checkpoint) -> expanded?`` on its own thread.

    ``checkpoint`` is to be called at every layer boundary; it raises Interrupted when the interval is over. Every
    method may be called from any thread.
    """

    def __init__(self, expand: Expand, clock: Callable[[], float] = time.monotonic) -> None:
        self._expand, self._clock = expand, clock
        self._changed = threading.Condition()
        self._wanted: list[ReferenceId] = []  # of this interval, best first
        self._next = 0  # position in it
        self._budget: int = 0
        self._deadline = 0.0
        self._calls = 0  # policy calls in flight
        self._busy = False
        self._closed = False
        self._jobs: deque[tuple[Future, Callable[[Callable[[], None]], object]]] = deque()
        self.expanded = self.interrupted = 0
        self.problem = ''  # the last failure that is not an episode's own
        self._thread = threading.Thread(target=self._run, name='reconstruct', daemon=True)
        self._thread.start()

    def open_interval(self, wanted: Sequence[ReferenceId], seconds: float, budget: int) -> None:
        """Expand up to ``budget`` references of ``wanted`` within the next ``seconds``; never blocks."""
        with self._changed:
            self._wanted, self._next, self._budget = list(wanted), 0, budget
            self._deadline = self._clock() + seconds
            self._changed.notify_all()

    @contextmanager
    def policy_call(self) -> Iterator[None]:
        """While inside, the thread does no model work beyond the layer it is in; what was wanted is void after."""
        with self._changed:
            self._calls += 1
            self._wanted = []
        try:
            yield
        finally:
            with self._changed:
                self._calls -= 1
                self._changed.notify_all()

    def submit(self, job: Callable[[Callable[[], None]], object]) -> Future:
        """Queue ``job(checkpoint)``; its checkpoint waits while a policy call runs. Done before expansions.

        The future holds the job's result or exception; a LibraryError for a job that ``close`` left undone.
        """
        future: Future = Future()
        with self._changed:
            closed = self._closed
            if not closed:
                self._jobs.append((future, job))
                self._changed.notify_all()
        if closed:
            _left_undone(future)
        return future

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Block until nothing is left to expand in the open interval (or its time is up)."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._busy or self._jobs or self._has_candidate()), timeout_s)

    def close(self, timeout_s: float = 10.0) -> bool:
        """Stop at the next layer boundary and join; False if the thread is still in a layer after the timeout."""
        with self._changed:
            self._closed, self._wanted = True, []
            undone = [future for future, _ in self._jobs]
            self._jobs.clear()
            self._changed.notify_all()
        for future in undone:
            if future.set_running_or_notify_cancel():
                _left_undone(future)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _has_candidate(self) -> bool:
        left = self._next < len(self._wanted) and self._budget > 0
        return left and not self._calls and self._clock() < self._deadline

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closed or self._has_candidate()
                                       or (self._jobs and not self._calls))
                if self._closed:
                    return
                self._busy = True
                job = self._jobs.popleft() if self._jobs else None
                if not job:
                    # All wishes of the interval, also those fulfilled: the rest must not take their slots.
                    wanted, reference = self._wanted, self._wanted[self._next]
                    self._next += 1
            if job:
                self._do(*job)
            else:
                self._try_expand(reference, wanted)

    def _try_expand(self, reference: ReferenceId, wanted: list[ReferenceId]) -> None:
        try:
            if self._expand(reference, wanted, self._stop_when_due):
                self.expanded += 1
                with self._changed:
                    self._budget -= 1
        except Interrupted:
            self.interrupted += 1
        except EpisodeError as error:
            log.warning(error)
        except Exception as error:  # a reference must never take the thread down: later ones may be fine
            self.problem = f'reference {reference} could not be expanded ({type(error).__name__}: {error})'
            log.exception(self.problem)

    def _do(self, future: Future, job: Callable[[Callable[[], None]], object]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(job(self._wait_for_call))
        except Interrupted:
            _left_undone(future)
        except BaseException as error:  # noqa: BLE001 - reported to whoever waits for the future
            future.set_exception(error)

    def _stop_when_due(self) -> None:
        if self._closed or self._calls or self._clock() >= self._deadline:
            raise Interrupted

    def _wait_for_call(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._calls)
            if self._closed:
                raise Interrupted


def _left_undone(future: Future) -> None:
    future.set_exception(LibraryError('the policy was closed before this was done, and nothing of it was written; save '
                                      'an episode before closing'))
