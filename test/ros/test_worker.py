# SPDX-License-Identifier: Apache-2.0
"""The inference thread by itself: resets that pile up, and one that fails."""

from __future__ import annotations

import threading

import pytest

from rmuscle_core.errors import DeviceError
from rmuscle_ros.worker import InferenceWorker


class Resettable:
    """Takes note of resets; the first does not end before ``go``."""

    def __init__(self):
        self.resets, self.begun, self.go = [], threading.Event(), threading.Event()

    def reset_episode(self, prompt):
        self.resets.append(prompt)
        self.begun.set()
        assert self.go.wait(20)

    def wait_ready(self, timeout_s):
        return True


@pytest.fixture
def worker():
    worker = InferenceWorker(Resettable(), *[lambda *_: None] * 4)
    yield worker
    worker._policy.go.set()
    assert worker.close(20)


def test_v11_resets_that_pile_up_are_one(worker):
    policy = worker._policy
    first = worker.reset('a')
    assert policy.begun.wait(20)
    later = [worker.reset(prompt) for prompt in 'bcd']
    saved = worker.submit(lambda: list(policy.resets))
    policy.go.set()
    assert saved.result(20) == ['a', 'd'] and first.done() and all(future.done() for future in later)
    worker.reset('e').result(20)
    assert policy.resets == ['a', 'd', 'e']


def test_a_lost_device_that_shows_in_a_reset_nobody_asked_for_ends_the_node(bench):
    def fail(prompt):
        raise DeviceError('the device failed; start again')

    assert bench.change('configure')
    bench.policy.reset_episode = fail
    assert bench.change('activate')
    bench.until(lambda: bench.node.fatal, 'the failure')
    assert 'the device failed' in bench.node.last_error
