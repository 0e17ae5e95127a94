# SPDX-License-Identifier: Apache-2.0
"""Benches with a node and a robot, and a checkpoint that fits them."""

from __future__ import annotations

import pytest
from robot_bench import Bench


@pytest.fixture(scope='session')
def checkpoint(tmp_path_factory):
    """Directory of a tiny checkpoint that fits the bench's robot."""
    from tiny_checkpoint import write_checkpoint
    return write_checkpoint(tmp_path_factory.mktemp('checkpoint'))


@pytest.fixture
def make_bench(ros_context):
    """Factory of benches; closes them."""
    benches = []

    def make(*arguments, **parameters):
        benches.append(Bench(*arguments, **parameters))
        return benches[-1]

    yield make
    for bench in benches:
        bench.close()
    assert [bench.rejected for bench in benches] == [[]] * len(benches), 'a controller would reject a trajectory'


@pytest.fixture
def bench(make_bench):
    return make_bench()


@pytest.fixture
def sim(make_bench):
    """Factory of an active bench in simulated time, at 100 s unless told otherwise."""
    def make(policy=None, start=100_000_000_000, **parameters):
        bench = make_bench(policy, use_sim_time=True, **parameters)
        bench.activate()
        if start:
            bench.send_time(start)
        return bench
    return make
