# SPDX-License-Identifier: Apache-2.0
"""The real openpi-client gets the policy's own answers, and no client can harm another one's."""

from __future__ import annotations

import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import msgpack
import numpy as np
import pytest
from tiny_policy import CAMERAS, JOINTS, PROMPT, WAIT_S
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from rmuscle_core.errors import DeviceError
from rmuscle_core.settings import Settings

client = pytest.importorskip('openpi_client.websocket_client_policy', reason='pip install --no-deps openpi-client')

DENSE = Settings(mode='dense')


def openpi(port):
    return client.WebsocketClientPolicy('127.0.0.1', port)


def healthy(port):
    with urllib.request.urlopen(f'http://127.0.0.1:{port}/healthz', timeout=WAIT_S) as answer:
        return (answer.status, answer.read()) == (200, b'OK\n')


def test_a_client_gets_metadata_then_the_policys_own_actions(open_policy, serving, look, request_of):
    expected = open_policy(DENSE).infer(look(1)).actions
    with serving(open_policy(DENSE)) as port:
        robot = openpi(port)
        assert robot.get_server_metadata()['cameras'] == list(CAMERAS)
        assert robot.get_server_metadata()['action_horizon'] == len(expected)
        for number in range(3):
            answer = robot.infer(request_of(look(1)))
            assert np.array_equal(answer['actions'], expected) and answer['actions'].dtype == np.float32
            assert answer['cache']['path'] == 'dense' and answer['server_timing']['infer_ms'] > 0
            assert ('prev_total_ms' in answer['server_timing']) == (number > 0)


def test_openpis_chunk_broker_plays_an_answer_step_by_step(open_policy, serving, look, request_of):
    broker = pytest.importorskip('openpi_client.action_chunk_broker', reason='needs dm-tree')
    expected = open_policy(DENSE).infer(look(1)).actions
    with serving(open_policy(DENSE)) as port:
        robot = broker.ActionChunkBroker(openpi(port), action_horizon=4)
        played = [robot.infer(request_of(look(1)))['actions'] for _ in range(4)]
    assert np.array_equal(played, expected[:4])


def test_a_call_may_use_the_episode_so_far_and_a_reset_forgets_it(open_policy, serving, look, request_of):
    policy = open_policy(Settings(min_similarity=0.1))
    published, told = threading.Event(), policy.chunk_published

    def chunk_published(seconds):
        told(float('inf'))  # all the time in the world, whatever the client's pace
        policy.wait_ready(WAIT_S)
        published.set()

    policy.chunk_published = chunk_published

    def call(robot, **more):
        published.clear()
        answer = robot.infer({**request_of(look(1)), **more})
        assert published.wait(WAIT_S)
        return answer['cache']['path']

    with serving(policy) as port:
        robot, other = openpi(port), openpi(port)
        assert [call(robot), call(robot)] == ['dense', 'previous_call']
        assert [call(robot, reset=True), call(robot)] == ['dense', 'previous_call']
        assert [call(robot, prompt='another'), call(robot, prompt='another')] == ['dense', 'previous_call']
        assert [call(other), call(robot), call(robot)] == ['dense', 'dense', 'previous_call']


def test_the_time_between_calls_is_the_time_to_prepare(open_policy, serving, look, request_of):
    policy, told = open_policy(DENSE), []
    policy.chunk_published = told.append
    with serving(policy, interval_s=7.0) as port:
        robot = openpi(port)
        for _ in range(3):
            robot.infer(request_of(look(1)))
        robot.infer({**request_of(look(1)), 'prompt': 'another episode of the same client'})
    assert told[0] == 7.0 and all(0 < seconds < 7.0 for seconds in told[1:3])


def test_the_next_client_meets_a_prepared_beginning(open_policy, serving, look, request_of):
    policy, resets, again = open_policy(DENSE), [], threading.Semaphore(0)
    reset = policy.reset_episode

    def reset_episode(prompt):
        reset(prompt)
        resets.append(prompt)
        again.release()

    policy.reset_episode = reset_episode
    with serving(policy) as port:
        for _ in range(2):
            robot = openpi(port)
            robot.infer(request_of(look(1)))
            robot._ws.close()
            assert again.acquire(timeout=WAIT_S)
    assert resets == [PROMPT, PROMPT]  # when they left, and not again at their first calls


def test_twenty_clients_at_once_each_get_their_own_answer(open_policy, serving, look, request_of):
    alone = open_policy(DENSE)
    expected = [alone.infer(look(seed, place=seed)).actions for seed in range(20)]

    def ask(seed):
        robot = openpi(port)
        return [robot.infer(request_of(look(seed, place=seed)))['actions'] for _ in range(3)]

    with serving(open_policy(DENSE)) as port, ThreadPoolExecutor(20) as pool:
        for seed, answers in enumerate(pool.map(ask, range(20))):
            assert all(np.array_equal(actions, expected[seed]) for actions in answers), seed
        assert healthy(port)


def test_calls_are_answered_in_turn_and_those_of_vanished_clients_withdrawn(open_policy, serving, look, request_of):
    policy, entered, go_on, seen = open_policy(DENSE), threading.Event(), threading.Event(), []
    infer = policy.infer

    def slow(observation):
        seen.append(observation.prompt)
        entered.set()
        assert go_on.wait(WAIT_S)
        return infer(observation)

    policy.infer = slow
    with serving(policy) as port, ThreadPoolExecutor(1) as pool:
        stays, waits, leaves = openpi(port), openpi(port), openpi(port)
        answer = pool.submit(stays.infer, {**request_of(look(1)), 'prompt': 'stays'})
        assert entered.wait(WAIT_S)
        assert healthy(port)  # while a call is under way
        leaves._ws.send(leaves._packer.pack({**request_of(look(2)), 'prompt': 'leaves while it waits'}))
        leaves._ws.close()  # returns when the server has closed its end too
        waits._ws.send(waits._packer.pack({**request_of(look(3)), 'prompt': 'waits'}))
        go_on.set()
        assert answer.result(WAIT_S)['actions'].shape == (8, JOINTS)
        assert isinstance(waits._ws.recv(WAIT_S), bytes)
        robot = openpi(port)
        entered.clear(), go_on.clear()
        robot._ws.send(robot._packer.pack({**request_of(look(4)), 'prompt': 'leaves in its call'}))
        assert entered.wait(WAIT_S)
        robot._ws.close()
        go_on.set()
        assert stays.infer({**request_of(look(1)), 'prompt': 'stays'})['actions'].shape == (8, JOINTS)
    assert seen == ['stays', 'waits', 'leaves in its call', 'stays']


def bad_requests():
    good = {'observation/base': np.zeros((32, 32, 3), np.uint8), 'observation/wrist': np.zeros((32, 32, 3), np.uint8),
            'observation/state': np.zeros(JOINTS, np.float32), 'prompt': PROMPT}
    pack = client.msgpack_numpy.packb
    yield 'no msgpack', b'\xc1\xc1', 'not msgpack'
    yield 'text', 'hello', 'text frame'
    yield 'not a map', pack([1, 2]), 'expected a map'
    yield 'nan', pack({**good, 'observation/state': np.full(JOINTS, np.nan)}), 'state dimension 0 is nan'
    yield 'infinite', pack({**good, 'observation/state': np.full(JOINTS, 1e300)}), 'state dimension 0 is inf'
    yield 'wrong length', pack({**good, 'observation/state': np.zeros(3)}), f'must have {JOINTS} values'
    yield 'wrong picture', pack({**good, 'observation/base': np.zeros((32, 32), np.uint8)}), 'must be uint8'
    yield 'missing', pack({'prompt': PROMPT}), 'no picture for camera base'
    yield 'object array', msgpack.packb({**dict.fromkeys(good, 1), 'observation/base': {
        b'__ndarray__': True, b'data': b'cos\nsystem\n', b'dtype': '|O', b'shape': [1]}}), "dtype '|O'"
    yield 'claims too much', msgpack.packb({'observation/base': {
        b'__ndarray__': True, b'data': bytes(9), b'dtype': '|u1', b'shape': [2**40, 2**40, 3]}}), 'with 9 bytes'
    yield 'thin', pack({**good, 'observation/base': np.zeros((1, 60000, 3), np.uint8)}), 'too thin'


@pytest.mark.parametrize(('frame', 'sentence'), [row[1:] for row in bad_requests()],
                         ids=[row[0] for row in bad_requests()])
def test_a_bad_request_is_answered_by_a_sentence_and_costs_nobody_else(open_policy, serving, look, request_of, frame,
                                                                       sentence):
    with serving(open_policy(DENSE)) as port:
        robot = openpi(port)
        before = robot.infer(request_of(look(1)))['actions']
        with connect(f'ws://127.0.0.1:{port}', compression=None) as hostile:
            hostile.recv(WAIT_S)
            hostile.send(frame)
            reason = hostile.recv(WAIT_S)
            assert isinstance(reason, str) and sentence in reason and 'Traceback' not in reason
            with pytest.raises(ConnectionClosed) as closed:
                hostile.recv(WAIT_S)
            assert closed.value.rcvd.code == 1011
        assert np.array_equal(robot.infer(request_of(look(1)))['actions'], before) and healthy(port)


def test_a_frame_beyond_the_limit_ends_its_connection_only(open_policy, serving, look, request_of):
    with serving(open_policy(DENSE)) as port:
        robot = openpi(port)
        with connect(f'ws://127.0.0.1:{port}', compression=None, max_size=None) as hostile:
            hostile.recv(WAIT_S)
            with pytest.raises(ConnectionClosed) as closed:
                hostile.send(bytes(65 * 2**20))
                hostile.recv(WAIT_S)
            assert closed.value.rcvd.code == 1009
        assert robot.infer(request_of(look(1)))['actions'].shape == (8, JOINTS) and healthy(port)


def test_a_failure_nobody_foresaw_comes_with_its_traceback(open_policy, serving, look, request_of):
    policy = open_policy(DENSE)
    infer = policy.infer
    with serving(policy) as port:
        robot, broken = openpi(port), openpi(port)
        policy.infer = lambda observation: 1 / 0
        with pytest.raises(RuntimeError, match=r'(?s)Traceback.*ZeroDivisionError'):
            broken.infer(request_of(look(1)))
        policy.infer = infer
        assert robot.infer(request_of(look(1)))['actions'].shape == (8, JOINTS)


def test_actions_that_are_not_finite_are_not_sent(open_policy, serving, look, request_of):
    policy = open_policy(DENSE)
    chunk = policy.infer(look(1))
    chunk.actions[0, 0] = np.nan
    policy.infer = lambda observation: chunk
    with serving(policy) as port, pytest.raises(RuntimeError, match='actions that are not finite'):
        openpi(port).infer(request_of(look(1)))


def test_a_failed_device_ends_the_server(open_policy, serving, look, request_of):
    policy = open_policy(DENSE)

    def infer(observation):
        raise DeviceError('the GPU fell off the bus; start the process again')

    policy.infer = infer
    with pytest.raises(DeviceError), serving(policy) as port, pytest.raises(RuntimeError, match='fell off the bus'):
        openpi(port).infer(request_of(look(1)))


def test_a_device_that_fails_between_calls_ends_the_server(open_policy, serving, look, request_of):
    policy = open_policy(DENSE)

    def chunk_published(seconds):
        raise DeviceError('the GPU fell off the bus; start the process again')

    policy.chunk_published = chunk_published
    with pytest.raises(DeviceError), serving(policy) as port:
        robot = openpi(port)
        robot.infer(request_of(look(1)))
        with pytest.raises(ConnectionClosed):
            robot._ws.recv(WAIT_S)


def test_web_pages_are_refused(open_policy, serving):
    with serving(open_policy(DENSE)) as port, pytest.raises(InvalidStatus) as refused:
        connect(f'ws://127.0.0.1:{port}', origin='http://evil.example')
    assert refused.value.response.status_code == 403
