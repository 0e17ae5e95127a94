# SPDX-License-Identifier: Apache-2.0
"""Interleaving and its statistics, on a clock that the test turns."""

import pytest

from rmuscle_core.bench import timing


class Clock:
    """Stands in for the time module; work advances it by what it costs at that moment."""

    def __init__(self):
        self.now, self.log = 0.0, []

    def perf_counter(self):
        return self.now

    def process_time(self):
        return self.now / 2

    def work(self, name, cost):
        def run():
            self.log.append(name)
            self.now += cost(self.now)
            return {'part': 1.0}
        return run


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(timing, 'time', made)
    return made


def test_every_variant_runs_between_two_baselines_and_warm_up_is_not_kept(clock):
    works = {n: clock.work(n, lambda now: 1.0) for n in ('a', 'b', 'c')}
    found = timing.interleave('a', works, rounds=2, warm_up=1)
    assert clock.log == list('abaca') * 3
    assert {n: len(v) for n, v in found.milliseconds.items()} == {'a': 6, 'b': 2, 'c': 2}
    assert found.stages['b']['part'] == [1.0, 1.0]


def test_speedup_survives_a_machine_that_gets_slower(clock):
    works = {'dense': clock.work('dense', lambda now: 2.0 + now / 100),
             'half': clock.work('half', lambda now: (2.0 + now / 100) / 2)}
    found = timing.interleave('dense', works, rounds=40)
    assert found.milliseconds['dense'][-1] > 2 * found.milliseconds['dense'][0]
    assert timing.summary(found.speedups['half'])['p50'] == pytest.approx(2.0, rel=1e-2)
    assert found.cpu_speedups == found.speedups  # this clock's CPU is busy half of the time, whatever runs
    assert not found.speedups['dense']


def test_summary_counts_and_orders():
    found = timing.summary([1.0, 2.0, 3.0, 4.0, 100.0])
    assert found['n'] == 5 and found['p50'] == 3.0
    assert found['q25'] < found['p50'] < found['q75'] < found['p95']
