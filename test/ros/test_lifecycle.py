# SPDX-License-Identifier: Apache-2.0
"""Transitions: refused with a reason, retryable, and without leftovers."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref

import pytest
import torch
from robot_bench import EchoPolicy

from rmuscle.msg import NodeStatus


def test_invalid_request_is_survived(bench, capfd):
    assert not bench.change('activate') and bench.state() == 'unconfigured'
    assert not bench.change('deactivate') and bench.state() == 'unconfigured'
    assert 'not possible in state unconfigured' in capfd.readouterr().err
    assert bench.change('configure') and bench.state() == 'inactive'
    assert not bench.change('configure') and bench.state() == 'inactive'


@pytest.mark.parametrize(('parameters', 'fix', 'words'), [
    ({'cameras': ['base']}, {'cameras': ['base', 'wrist']}, ['wrist', 'masked_cameras']),
    ({'joint_names': ['j1', 'j2']}, {'joint_names': [f'j{i}' for i in range(7)]}, ['joint_names', '2 joints', '7']),
    ({'execute_steps': 17}, {'execute_steps': 16}, ['execute_steps', '17', '16']),
    ({'checkpoint': None, 'cameras': None}, {'checkpoint': 'here', 'cameras': ['base', 'wrist']},
     ['checkpoint, cameras', '/**']),
    ({'joint_lower': [1.0], 'joint_upper': [0.0]}, {'joint_upper': [2.0]}, ['joint_lower', 'j1'])])
def test_configure_checks_before_loading_and_may_be_tried_again(make_bench, parameters, fix, words, capfd):
    bench = make_bench(**parameters)
    assert not bench.change('configure') and bench.state() == 'unconfigured'
    assert bench.loaded == []
    said = capfd.readouterr().err
    assert all(word in said for word in words) and 'Traceback' in said and words[0] in bench.node.last_error
    assert all(r.successful for r in bench.set(**fix))
    assert bench.change('configure') and bench.state() == 'inactive' and bench.node.last_error == ''


def heartbeat(bench, condition, what):
    """Wait for a ~/status that fulfils the condition; returns it."""
    found = []
    subscription = bench.robot.create_subscription(NodeStatus, 'policy_node/status',
                                                   lambda m: found.append(m) if condition(m) else None, 10)
    bench.until(lambda: found, what)
    bench.robot.destroy_subscription(subscription)
    return found[0]


def test_v23_missing_checkpoint_is_named_and_may_be_tried_again(make_bench, checkpoint, tmp_path, capfd):
    bench = make_bench(real=True, checkpoint=str(tmp_path / 'absent'), device='cpu')
    assert not bench.change('configure') and bench.state() == 'unconfigured'
    said = capfd.readouterr().err
    assert str(tmp_path / 'absent') in said and 'Traceback' in said
    status = heartbeat(bench, lambda s: s.last_error, 'the reason in ~/status')
    assert 'absent' in status.last_error and '\n' not in status.last_error and status.state == 'unconfigured'
    assert bench.set(checkpoint=str(checkpoint))[0].successful
    assert bench.change('configure') and bench.state() == 'inactive'
    assert heartbeat(bench, lambda s: s.state == 'inactive', 'the new state').last_error == ''


@pytest.mark.parametrize(('name', 'after'), [('activate', 'inactive'), ('deactivate', 'active'),
                                             ('cleanup', 'inactive')])
def test_v23_every_transition_that_raises_says_where_and_may_be_tried_again(bench, monkeypatch, capfd, name, after):
    """V23's siblings: not only configure."""
    assert bench.change('configure')
    if name == 'deactivate':
        assert bench.change('activate')
    broken = {'activate': 'begin_episode', 'deactivate': 'stop_calls', 'cleanup': '_release'}[name]

    def fail():
        raise ValueError(f'{broken} is\nbroken')

    with monkeypatch.context() as patch:
        patch.setattr(bench.node, broken, fail)
        assert not bench.change(name) and bench.state() == after
        said = capfd.readouterr().err
        assert 'Traceback' in said and f'{broken}()' in said
        assert bench.node.last_error == f'ValueError: {broken} is broken'
    assert bench.change(name) and bench.node.last_error == ''


def test_failure_after_loading_frees_the_policy(bench, capfd):
    def fail(prompt):
        raise ValueError('out of memory')

    bench.policy.warm_up = fail
    assert not bench.change('configure') and bench.state() == 'unconfigured'
    assert bench.policy.closed and bench.node._policy is None
    assert bench.node.last_error == 'ValueError: out of memory'
    assert 'Traceback' in capfd.readouterr().err  # nobody foresaw it, so whoever looks into it needs the place


def live_storages():
    """Bytes of the distinct torch storages that live objects hold."""
    gc.collect()
    tensors = [o for o in gc.get_objects() if isinstance(o, torch.Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def test_v24_five_cycles_leave_nothing_behind(make_bench, checkpoint, tmp_path):
    bench = make_bench(real=True, checkpoint=str(checkpoint), library=str(tmp_path / 'library'), device='cpu', slots=4)
    policies, before, others = [], live_storages(), set(threading.enumerate())

    def cycle():
        bench.activate()
        policies.append(weakref.ref(bench.node._policy))
        count = len(bench.statuses)
        bench.fed_until(lambda: len(bench.statuses) > count, 'a call', timeout_s=60)
        assert bench.save(True).success
        assert bench.change('deactivate') and bench.change('cleanup')
        return threading.active_count(), len(os.listdir('/proc/self/fd')), len(list(bench.node.subscriptions))

    first = cycle()
    for _ in range(4):
        assert cycle() == first
    assert live_storages() <= before + 1_000_000
    assert [ref() for ref in policies] == [None] * 5
    assert not {'inference', 'reconstruct'} & {thread.name for thread in {*threading.enumerate()} - others}


def test_deactivate_holds_where_the_robot_is_and_does_not_wait_for_the_call(make_bench):
    gate, entered = threading.Event(), []

    def block(policy):
        entered.append(len(policy.seen))
        if len(policy.seen) == 2:
            gate.wait(20)

    bench = make_bench(EchoPolicy(gate=block))
    bench.activate()
    bench.until(lambda: (bench.send(positions=(.2,) * 7), len(entered) == 2)[1], 'the second call')
    chunks = len(bench.trajectories)
    since = time.monotonic()
    assert bench.change('deactivate') and bench.state() == 'inactive'
    assert time.monotonic() - since < 10 and not gate.is_set()  # answered while the policy is still in its call
    bench.until(lambda: len(bench.trajectories) > chunks, 'the hold')
    assert len(bench.trajectories[-1].points) == 1
    gate.set()
    bench.until(lambda: bench.node._worker.discarded == 1, 'the late answer')
    assert bench.change('cleanup') and bench.state() == 'unconfigured'


def test_v24_cleanup_during_an_endless_call_is_refused_and_may_be_tried_again(make_bench, monkeypatch):
    monkeypatch.setattr('rmuscle_ros.node.JOIN_S', 0.05)
    gate, entered = threading.Event(), threading.Event()
    bench = make_bench(EchoPolicy(gate=lambda _: (entered.set(), gate.wait(20))[0]))
    bench.activate()
    bench.fed_until(entered.is_set, 'the call')
    assert bench.change('deactivate')
    assert not bench.change('cleanup') and bench.state() == 'inactive'
    assert 'policy call has been running' in bench.node.last_error
    gate.set()
    bench.until(lambda: bench.node._worker.discarded == 1, 'the late answer')
    assert bench.change('cleanup')


def test_cleanup_while_an_episode_is_being_prepared_says_so(make_bench, monkeypatch):
    monkeypatch.setattr('rmuscle_ros.node.JOIN_S', 0.05)
    gate, entered, policy = threading.Event(), threading.Event(), EchoPolicy()
    policy.wait_ready = lambda timeout_s: (entered.set(), gate.wait(20))
    bench = make_bench(policy)
    bench.activate()
    bench.until(entered.is_set, 'the preparation')
    assert bench.change('deactivate') and not bench.change('cleanup')
    assert 'an episode is being prepared' in bench.node.last_error
    gate.set()
    bench.until(lambda: not bench.node._worker._busy, 'the end of the preparation')
    assert bench.change('cleanup')


def test_services_answer_in_any_state(bench):
    assert not bench.trigger('start').success
    assert not bench.trigger('reset_episode').success
    assert not bench.trigger('reload_library').success
    assert not bench.save(True).success
    assert bench.trigger('stop').success
    assert bench.change('configure')
    assert 'inactive' in bench.trigger('start').message
    assert bench.trigger('reset_episode').success


def test_without_autostart_it_waits_for_start(make_bench):
    bench = make_bench(autostart_episode=False)
    bench.activate()
    bench.send()
    bench.until(lambda: bench.node._buffer.problem(bench.now_ns()) == '', 'the observation')
    assert bench.policy.seen == []
    assert bench.trigger('start').success
    bench.fed_until(lambda: bench.statuses, 'a call')


def test_topics_are_relative_but_for_the_usual_ones(bench):
    assert bench.change('configure')
    own = {p.topic_name for p in bench.node.publishers} | {s.topic_name for s in bench.node.subscriptions}
    relative = own - {'/diagnostics', '/parameter_events', '/rosout', '/clock'}
    expected = ('joint_trajectory', 'joint_states', 'prompt', 'base/image_raw')
    assert {f'{bench.namespace}/{name}' for name in expected} < relative
    assert all(name.startswith(bench.namespace + '/') for name in relative)
