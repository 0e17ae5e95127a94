# SPDX-License-Identifier: Apache-2.0
"""The inference thread: one policy call after another, each when an observation newer than the executed chunk is there.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from rmuscle_core.errors import RMuscleError
from rmuscle_core.observation import ActionChunk, Leftover
from rmuscle_core.sensing.observe import Snapshot

READY_S = 5.0


class InferenceWorker:
    """Runs ``policy`` on a thread of its own; every method here may be called from any thread and returns at once.

    observe(not_before_ns) -> Snapshot or None: called on the inference thread.
    deliver(chunk, snapshot) -> (not_before_ns, seconds until the next call): publishes; raises ChunkRefused.
    failed(error): told of every exception, on the inference thread.
    leftover(snapshot) -> what the robot still executes, for real-time chunking; None without.

    Every stop or reset starts a new epoch. An answer computed in an older one is dropped, however late it comes.
    """

    def __init__(self, policy: Any, observe: Callable[[int], Snapshot | None],
                 deliver: Callable[[ActionChunk, Snapshot], tuple[int, float]], failed: Callable[[Exception], None],
                 leftover: Callable[[Snapshot], Leftover | None]):
        self._policy, self._observe, self._deliver, self._failed = policy, observe, deliver, failed
        self._leftover = leftover
        self._changed = threading.Condition()
        self._tasks: deque[tuple[Callable[[], Any], Future]] = deque()
        self._running = self._closing = self._news = self._busy = False
        self._epoch = self._not_before_ns = 0
        self._waiting_reset: tuple[str, Future] | None = None  # prompt; while its task has not begun
        self._call_since: float | None = None
        self.calls = self.discarded = 0
        self._thread = threading.Thread(target=self._run, name='inference', daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._running

    def start(self) -> None:
        """Call the policy from now on, whenever there is something new to see."""
        with self._changed:
            self._running = self._news = True
            self._not_before_ns = 0
            self._changed.notify_all()

    def stop(self) -> None:
        """No call starts after this, and what the one in flight returns is dropped."""
        with self._changed:
            self._running = False
            self._epoch += 1

    def abandon_call(self) -> None:
        """Drop what the call in flight will return, and go on with a new observation after it."""
        with self._changed:
            self._epoch += 1

    def reset(self, prompt: str) -> Future:
        """Begin a new episode: the call in flight is dropped, the next may use any observation.

        The future is done when the references that the first call may need are expanded, or after READY_S. Of several
        that wait for the thread one is carried out, with the last prompt: a clock that two nodes publish asks for
        hundreds in a second.
        """
        def begin() -> None:
            with self._changed:
                (asked, _), self._waiting_reset = self._waiting_reset, None
            self._policy.reset_episode(asked)
            self._policy.wait_ready(READY_S)

        with self._changed:
            self._epoch += 1
            self._not_before_ns = 0
            future = self._waiting_reset[1] if self._waiting_reset else self.submit(begin)
            self._waiting_reset = prompt, future
        return future

    def submit(self, task: Callable[[], Any]) -> Future:
        """Run a task on the inference thread, between two calls; the future holds its result."""
        future: Future = Future()
        with self._changed:
            if self._closing:
                future.set_exception(RMuscleError('the policy is being shut down; configure the node again'))
            else:
                self._tasks.append((task, future))
                self._changed.notify_all()
        return future

    def wake(self) -> None:
        """A new sample arrived."""
        with self._changed:
            self._news = True
            self._changed.notify_all()

    def call_age_s(self) -> float:
        """How long the call in flight has been running, by the steady clock; 0 when there is none."""
        since = self._call_since
        return 0.0 if since is None else time.monotonic() - since

    def close(self, timeout_s: float) -> bool:
        """Stop and end the thread; False, with the thread still there, if a call in flight does not return in time."""
        with self._changed:
            self._running = False
            self._epoch += 1
            if not self._changed.wait_for(lambda: not self._busy, timeout_s):
                return False
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closing or self._tasks or (self._running and self._news))
                if self._closing:
                    break
                self._busy = True
                task = self._tasks.popleft() if self._tasks else None
                self._news = self._news and task is not None
                epoch, not_before_ns = self._epoch, self._not_before_ns
            if task is None:
                self._call(epoch, not_before_ns)
            else:
                _perform(*task)
        for _, future in self._tasks:
            future.cancel()

    def _call(self, epoch: int, not_before_ns: int) -> None:
        try:
            snapshot = self._observe(not_before_ns)
            if snapshot is None:
                return
            self._call_since = time.monotonic()
            leftover = self._leftover(snapshot)
            chunk = self._policy.infer(snapshot.observation, *([] if leftover is None else [leftover]))
            self.calls += 1
            # Publishing under the lock is what makes stop() the last word: a chunk is out before it, or never.
            with self._changed:
                if epoch != self._epoch:
                    self.discarded += 1
                    return
                self._not_before_ns, interval_s = self._deliver(chunk, snapshot)
            self._policy.chunk_published(interval_s)
        except Exception as error:  # noqa: BLE001 - whatever the policy raises must not end the thread silently
            self._failed(error)
        finally:
            self._call_since = None


def _perform(task: Callable[[], Any], future: Future) -> None:
    try:
        future.set_result(task())
    except Exception as error:  # noqa: BLE001 - handed to whoever waits for the task
        future.set_exception(error)
