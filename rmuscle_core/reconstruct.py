# SPDX-License-Identifier: Apache-2.0
"""The thread that expands likely references while the robot executes a chunk.

A published chunk opens an interval; the next policy call closes it. Inside it candidates are expanded in order
of likelihood, and what time is left goes to one piece of spare work. A call that is due stops both at the next layer
boundary; other work (writing an episode) only pauses there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

from rmuscle_core.engine.faults import as_device_error, device_failed
from rmuscle_core.errors import DeviceError, EpisodeError, LibraryError
from rmuscle_core.ffn import Interrupted
from rmuscle_core.library import ReferenceId

log = logging.getLogger(__name__)

Checkpoint = Callable[[], None]
Expand = Callable[[ReferenceId, Sequence[ReferenceId], Checkpoint], bool]
FAILURES, WITHIN_S = 5, 60.0  # more failures in this time, and it stays off


class Reconstructor:
    """Runs ``expand(reference_id, wanted, checkpoint) -> expanded?`` on its own thread.

    ``checkpoint`` is to be called at every layer boundary; it raises Interrupted when the interval is over. Every
    method may be called from any thread.

    An exception ends what it came from, and the next candidate is tried; a thread that died is started again. After
    too many of either in a short time expansion stays off. A lost device ends it at once, and every policy call too.
    """

    def __init__(self, expand: Expand, clock: Callable[[], float] = time.monotonic) -> None:
        self._expand, self._clock = expand, clock
        self._changed = threading.Condition()
        self._wanted: list[ReferenceId] = []  # of this interval, best first
        self._next = 0  # position in it
        self._budget: int = 0
        self._deadline = 0.0
        self._spare: Callable[[Checkpoint], None] | None = None  # of this interval
        self._calls = 0  # policy calls in flight
        self._busy = self._expanding = False
        self._closed = False
        self._jobs: deque[tuple[Future, Callable[[Checkpoint], object]]] = deque()
        self.expanded = self.interrupted = 0
        self.problem = ''  # the last failure that is not an episode's own
        self.off = False  # nothing is expanded any more
        self.lost: DeviceError | None = None
        self._failures: deque[float] = deque(maxlen=FAILURES)  # when the last ones were
        self._start_thread()

    def open_interval(self, wanted: Sequence[ReferenceId], seconds: float, budget: int,
                      spare: Callable[[Checkpoint], None] | None = None) -> None:
        """Expand up to ``budget`` references of ``wanted`` within the next ``seconds``, then do ``spare(checkpoint)``
        once; never blocks."""
        with self._changed:
            self._wanted, self._next, self._budget, self._spare = list(wanted), 0, budget, spare
            self._deadline = self._clock() + seconds
            self._revive()
            self._changed.notify_all()

    @contextmanager
    def policy_call(self) -> Iterator[None]:
        """While inside, the thread does no model work beyond the layer it is in; what was wanted is void after.

        Raises DeviceError once the device is known to be lost.
        """
        with self._changed:
            if self.lost:
                raise self.lost
            self._calls += 1
            self._wanted, self._spare = [], None
        try:
            yield
        finally:
            with self._changed:
                self._calls -= 1
                self._changed.notify_all()

    def submit(self, job: Callable[[Checkpoint], object]) -> Future:
        """Queue ``job(checkpoint)``; its checkpoint waits while a policy call runs. Done before expansions.

        The future holds the job's result or exception; a LibraryError for a job that ``close`` left undone.
        """
        future: Future = Future()
        with self._changed:
            closed = self._closed
            if not closed:
                self._jobs.append((future, job))
                self._revive()
                self._changed.notify_all()
        if closed:
            _left_undone(future)
        return future

    def wait_yielded(self, timeout_s: float) -> bool:
        """Within `policy_call`: block until the thread uses no slot; False if a layer takes longer than that."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._expanding, timeout_s)

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Block until nothing is left to expand in the open interval (or its time is up)."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._busy or self._jobs or self._has_candidate()), timeout_s)

    def close(self, timeout_s: float = 10.0) -> bool:
        """Stop at the next layer boundary and join; False if the thread is still in a layer after the timeout."""
        with self._changed:
            self._closed, self._wanted, self._spare = True, [], None
            undone = [future for future, _ in self._jobs]
            self._jobs.clear()
            self._changed.notify_all()
        for future in undone:
            if future.set_running_or_notify_cancel():
                _left_undone(future)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _has_candidate(self) -> bool:
        left = self._spare is not None or (self._next < len(self._wanted) and self._budget > 0)
        return left and not (self.off or self._calls) and self._clock() < self._deadline

    def _start_thread(self) -> None:
        self._thread = threading.Thread(target=self._serve, name='reconstruct', daemon=True)
        self._thread.start()

    def _revive(self) -> None:
        """Start the thread again if it has died; called under the lock."""
        if not self._closed and not self._thread.is_alive():
            self._start_thread()

    def _serve(self) -> None:
        while True:
            try:
                return self._run()
            except BaseException as error:  # noqa: BLE001 - nobody else would hear of it
                self._failed('the reconstruct thread broke down and was started again', error)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = self._expanding = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closed or self._has_candidate()
                                       or (self._jobs and not self._calls))
                if self._closed:
                    return
                self._busy = True
                job = self._jobs.popleft() if self._jobs else None
                self._expanding = job is None
                if job is None:
                    work = self._next_work()
            if job:
                self._do(*job)
            else:
                self._attempt(*work)

    def _next_work(self) -> tuple[str, Callable[[], bool]]:
        """What is to be done next in the interval, and the name it has in a message; called under the lock."""
        # Below 0: an expansion of the last interval ended in this one.
        if self._next == len(self._wanted) or self._budget <= 0:
            spare, self._spare = self._spare, None
            return 'the shadow check failed', lambda: bool(spare(self._stop_when_due))
        # All wishes of the interval, also those fulfilled: the rest must not take their slots.
        wanted, reference = self._wanted, self._wanted[self._next]
        self._next += 1
        return (f'reference {reference} could not be expanded',
                lambda: self._expand(reference, wanted, self._stop_when_due))

    def _attempt(self, failure: str, work: Callable[[], bool]) -> None:
        try:
            if work():
                self.expanded += 1
                with self._changed:
                    self._budget -= 1
        except Interrupted:
            self.interrupted += 1
        except EpisodeError as error:
            log.warning(error)
        except Exception as error:  # noqa: BLE001 - a reference must not take the thread down
            self._failed(failure, error)

    def _failed(self, what: str, error: BaseException) -> None:
        """Keep account of a failure; the device's own, and too many in a short time, end expansion."""
        now = self._clock()
        often = len(self._failures) == FAILURES and now - self._failures[0] < WITHIN_S
        self._failures.append(now)
        self.problem = f'{what} ({type(error).__name__}: {error})'
        if device_failed(error):
            self.lost = as_device_error(error)
            self.problem = str(self.lost)
        elif often:
            self.problem += (f'; this was failure {FAILURES + 1} in {WITHIN_S:g} s, so no reference is expanded any '
                             'more and calls run dense: configure the node again')
        self.off = self.off or often or self.lost is not None
        log.error(self.problem, exc_info=error)

    def _do(self, future: Future, job: Callable[[Checkpoint], object]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(job(self._wait_for_call))
        except Interrupted:
            _left_undone(future)
        except BaseException as error:  # noqa: BLE001 - reported to whoever waits for the future
            if device_failed(error):
                self._failed('', error)
            future.set_exception(self.lost or error)

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
