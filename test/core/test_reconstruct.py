# SPDX-License-Identifier: Apache-2.0
import threading

import pytest

from rmuscle_core.errors import LibraryError
from rmuscle_core.library import ReferenceId
from rmuscle_core.reconstruct import Reconstructor

IDS = [ReferenceId('task', 'episode', i) for i in range(5)]
WAIT_S = 20  # an upper bound, never waited for when the code is right


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Layers:
    """An expansion of two layers that the test steps through."""

    def __init__(self):
        self.entered, self.proceed = threading.Semaphore(0), threading.Semaphore(0)
        self.done, self.begun = [], []

    def __call__(self, reference, wanted, checkpoint):
        self.begun.append(reference)
        for _ in range(2):
            checkpoint()
            self.entered.release()
            assert self.proceed.acquire(timeout=WAIT_S)
        checkpoint()
        self.done.append(reference)
        return True


@pytest.fixture
def start():
    running = []

    def make(expand, clock=None):
        running.append(Reconstructor(expand, clock or Clock()))
        return running[-1]

    yield make
    for reconstructor in running:
        assert reconstructor.close(WAIT_S)


def expand_all(done):
    return lambda reference, wanted, checkpoint: not done.append(reference)


def test_candidates_are_expanded_in_order_within_the_budget(start):
    done = []
    reconstructor = start(expand_all(done))
    reconstructor.open_interval(IDS, 1.0, budget=3)
    assert reconstructor.wait_idle(WAIT_S)
    assert done == IDS[:3]


def test_every_expansion_knows_all_that_is_wanted_in_the_interval(start):
    seen = []
    reconstructor = start(lambda reference, wanted, checkpoint: not seen.append((reference, tuple(wanted))))
    reconstructor.open_interval(IDS, 1.0, budget=5)
    assert reconstructor.wait_idle(WAIT_S)
    assert seen == [(reference, tuple(IDS)) for reference in IDS]


def test_what_is_ready_already_does_not_count_against_the_budget(start):
    seen = []
    reconstructor = start(lambda reference, wanted, checkpoint: seen.append(reference) or reference.call >= 3)
    reconstructor.open_interval(IDS, 1.0, budget=1)
    assert reconstructor.wait_idle(WAIT_S)
    assert seen == IDS[:4]


def test_a_due_call_stops_the_expansion_at_the_next_layer(start):
    layers = Layers()
    reconstructor = start(layers)
    reconstructor.open_interval(IDS, 1.0, budget=5)
    assert layers.entered.acquire(timeout=WAIT_S)
    with reconstructor.policy_call():
        layers.proceed.release()
        assert reconstructor.wait_idle(WAIT_S)
        assert layers.done == [] and layers.begun == IDS[:1]
    assert reconstructor.wait_idle(WAIT_S)  # what was wanted before the call is void after it
    assert layers.begun == IDS[:1] and reconstructor.interrupted == 1


def test_the_end_of_the_interval_stops_it_too(start):
    clock, layers = Clock(), Layers()
    reconstructor = start(layers, clock)
    reconstructor.open_interval(IDS, 1.0, budget=5)
    assert layers.entered.acquire(timeout=WAIT_S)
    clock.now = 1.0
    layers.proceed.release()
    assert reconstructor.wait_idle(WAIT_S)
    assert layers.done == [] and layers.begun == IDS[:1]


def test_one_broken_reference_does_not_stop_the_others(start):
    done = []

    def expand(reference, wanted, checkpoint):
        if reference.call == 1:
            raise ValueError('broken file')
        done.append(reference)
        return True

    reconstructor = start(expand)
    reconstructor.open_interval(IDS, 1.0, budget=5)
    assert reconstructor.wait_idle(WAIT_S)
    assert done == [IDS[0], *IDS[2:]]
    assert 'broken file' in reconstructor.problem and str(IDS[1]) in reconstructor.problem


def test_a_job_pauses_while_a_call_runs_and_then_finishes(start):
    reconstructor = start(expand_all([]))
    begun, go = threading.Event(), threading.Event()

    def job(checkpoint):
        begun.set()
        assert go.wait(WAIT_S)
        checkpoint()
        return 'written'

    future = reconstructor.submit(job)
    assert begun.wait(WAIT_S)
    with reconstructor.policy_call():
        go.set()
        assert not future.done()
    assert future.result(WAIT_S) == 'written'


def test_a_failing_job_reports_to_its_future_and_the_thread_lives_on(start):
    done = []
    reconstructor = start(expand_all(done))
    with pytest.raises(OSError, match='disk full'):
        reconstructor.submit(lambda checkpoint: (_ for _ in ()).throw(OSError('disk full'))).result(WAIT_S)
    reconstructor.open_interval(IDS[:1], 1.0, budget=1)
    assert reconstructor.wait_idle(WAIT_S) and done == IDS[:1]


def test_close_joins_in_the_middle_of_an_expansion(start):
    layers = Layers()
    reconstructor = start(layers)
    reconstructor.open_interval(IDS, 1.0, budget=5)
    assert layers.entered.acquire(timeout=WAIT_S)
    layers.proceed.release()
    assert reconstructor.close(WAIT_S)
    assert layers.done == [] or layers.begun == IDS[:1]


def test_what_close_leaves_undone_says_so(start):
    begun, go = threading.Event(), threading.Event()

    def job(checkpoint):
        begun.set()
        assert go.wait(WAIT_S)
        while True:
            checkpoint()

    reconstructor = start(expand_all([]))
    futures = [reconstructor.submit(job), reconstructor.submit(job)]
    assert begun.wait(WAIT_S)
    assert not reconstructor.close(0.0)
    go.set()
    assert reconstructor.close(WAIT_S)
    for future in (*futures, reconstructor.submit(job)):  # under way, waiting, and too late
        with pytest.raises(LibraryError, match='closed'):
            future.result(WAIT_S)
