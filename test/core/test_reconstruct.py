# SPDX-License-Identifier: Apache-2.0
import sys
import threading

import pytest

from rmuscle_core.errors import DeviceError, LibraryError
from rmuscle_core.library import ReferenceId
from rmuscle_core.reconstruct import FAILURES, WITHIN_S, Reconstructor

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


def test_an_expansion_stops_when_the_time_is_up(start):
    clock, layers = Clock(), Layers()
    reconstructor = start(layers, clock)
    reconstructor.open_interval(IDS[:2], 1.0, budget=2)
    assert layers.entered.acquire(timeout=WAIT_S)
    clock.now = 1.0
    layers.proceed.release()
    assert reconstructor.wait_idle(WAIT_S) and layers.begun == IDS[:1] and layers.done == []
    assert reconstructor.interrupted == 1


def test_an_interval_opened_during_a_call_begins_after_it(start):
    done = []
    reconstructor = start(expand_all(done))
    with reconstructor.policy_call():
        reconstructor.open_interval(IDS[:2], 1.0, budget=2)
        assert reconstructor.wait_idle(WAIT_S) and done == []
    assert reconstructor.wait_idle(WAIT_S) and done == IDS[:2]


def test_an_expansion_that_ends_in_the_next_interval_opens_its_budget_no_further(start):
    done, spare = [], threading.Event()

    def expand(reference, wanted, checkpoint):
        done.append(reference)
        if len(done) == 1:
            reconstructor.open_interval(IDS[1:], 1.0, budget=0, spare=lambda checkpoint: spare.set())
        return True

    reconstructor = start(expand)
    reconstructor.open_interval(IDS[:1], 1.0, budget=1)
    assert spare.wait(WAIT_S) and reconstructor.wait_idle(WAIT_S)
    assert done == IDS[:1]


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


def test_spare_work_is_done_once_after_what_is_wanted(start):
    done = []
    reconstructor = start(expand_all(done))
    reconstructor.open_interval(IDS, 1.0, budget=2, spare=lambda checkpoint: done.append('spare'))
    assert reconstructor.wait_idle(WAIT_S)
    assert done == [*IDS[:2], 'spare'] and reconstructor.expanded == 2


def test_a_due_call_stops_spare_work_and_time_that_is_up_leaves_it_undone(start):
    clock, begun, go, done = Clock(), threading.Event(), threading.Event(), []

    def spare(checkpoint):
        begun.set()
        assert go.wait(WAIT_S)
        checkpoint()
        done.append('spare')

    reconstructor = start(expand_all([]), clock)
    reconstructor.open_interval([], 1.0, budget=1, spare=spare)
    assert begun.wait(WAIT_S)
    with reconstructor.policy_call():
        go.set()
        assert reconstructor.wait_yielded(WAIT_S)
    assert reconstructor.wait_idle(WAIT_S) and done == [] and reconstructor.interrupted == 1
    reconstructor.open_interval([], 0.0, budget=1, spare=spare)
    assert reconstructor.wait_idle(WAIT_S) and done == []


def test_a_call_can_wait_until_no_slot_is_being_written(start):
    layers = Layers()
    reconstructor = start(layers)
    reconstructor.open_interval(IDS, 1.0, budget=5)
    assert layers.entered.acquire(timeout=WAIT_S)
    with reconstructor.policy_call():
        assert not reconstructor.wait_yielded(0.0)
        layers.proceed.release()
        assert reconstructor.wait_yielded(WAIT_S)


def broken(reference, wanted, checkpoint):
    raise ValueError('broken engine')


def test_too_many_failures_in_a_short_time_switch_expansion_off(start):
    clock, done = Clock(), []
    reconstructor = start(broken, clock)
    for _ in range(FAILURES + 1):
        assert not reconstructor.off
        reconstructor.open_interval(IDS[:1], 1.0, budget=1)
        assert reconstructor.wait_idle(WAIT_S)
        clock.now += WITHIN_S / (FAILURES + 1)
    assert reconstructor.off and 'configure the node again' in reconstructor.problem
    reconstructor.open_interval(IDS, 1.0, budget=5, spare=lambda checkpoint: done.append('spare'))
    assert reconstructor.wait_idle(WAIT_S) and done == []
    assert reconstructor.submit(lambda checkpoint: 'written').result(WAIT_S) == 'written'


def test_as_many_failures_over_a_long_time_do_not(start):
    clock = Clock()
    reconstructor = start(broken, clock)
    for _ in range(3 * FAILURES):
        reconstructor.open_interval(IDS[:1], 1.0, budget=1)
        assert reconstructor.wait_idle(WAIT_S)
        clock.now += WITHIN_S / FAILURES
    assert not reconstructor.off


def test_a_thread_that_broke_down_is_started_again_and_says_so(start):
    done = []

    def expand(reference, wanted, checkpoint):
        if reference.call == 0:
            raise SystemExit('a library called exit')
        return not done.append(reference)

    reconstructor = start(expand)
    reconstructor.open_interval(IDS[:3], 1.0, budget=5)
    assert reconstructor.wait_idle(WAIT_S) and done == IDS[1:3]
    assert 'a library called exit' in reconstructor.problem and 'started again' in reconstructor.problem


def test_a_dead_thread_is_noticed(start, monkeypatch):
    done = []
    reconstructor = start(expand_all(done))
    first = reconstructor._thread
    with monkeypatch.context() as patch:
        patch.setattr(reconstructor, '_failed', lambda *_: sys.exit())  # even the account of a failure fails
        patch.setattr(threading, 'excepthook', lambda _: None)
        patch.setattr(reconstructor, '_run', lambda: (_ for _ in ()).throw(ValueError('broken')))
        patch.setattr(reconstructor, '_expand', broken)
        reconstructor.open_interval(IDS[:1], 1.0, budget=1)
        first.join(WAIT_S)
    assert not first.is_alive()
    reconstructor.open_interval(IDS[:2], 1.0, budget=5)
    assert reconstructor.wait_idle(WAIT_S) and done == IDS[:2]


@pytest.mark.parametrize('job', [False, True])
def test_a_lost_device_ends_expansion_and_every_later_call(start, job):
    begun = []

    def fail(*_):
        begun.append(1)
        raise RuntimeError('CUDA error: an illegal memory access was encountered')

    reconstructor = start(fail)
    if job:
        with pytest.raises(DeviceError):
            reconstructor.submit(fail).result(WAIT_S)
    else:
        reconstructor.open_interval(IDS, 1.0, budget=5)
    assert reconstructor.wait_idle(WAIT_S) and begun == [1] and 'illegal memory' in reconstructor.problem
    for _ in range(2):
        with pytest.raises(DeviceError, match='start the process again'), reconstructor.policy_call():
            pass
