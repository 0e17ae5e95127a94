# SPDX-License-Identifier: Apache-2.0
"""Frames of the real openpi-client are read, its reader reads ours, and no frame can do more than be refused."""

from __future__ import annotations

import pickle
from contextlib import suppress

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmuscle_core.errors import ObservationError
from rmuscle_core.serve.wire import pack, unpack

msgpack_numpy = pytest.importorskip('openpi_client.msgpack_numpy', reason='pip install --no-deps openpi-client')


@pytest.mark.parametrize('dtype', ['uint8', 'float32', 'float64', 'int64', 'bool', '>f4', 'float16'])
def test_arrays_of_the_client_arrive_as_they_were(dtype):
    sent = (np.arange(24).reshape(2, 3, 4) % 2).astype(dtype)
    read = unpack(msgpack_numpy.packb({'observation/image': sent, 'nested': {'state': sent[0, 0]}, 'prompt': 'go'}))
    assert read['observation/image'].dtype == sent.dtype and np.array_equal(read['observation/image'], sent)
    assert np.array_equal(read['nested']['state'], sent[0, 0]) and read['prompt'] == 'go'


def test_the_client_reads_our_arrays_and_scalars():
    actions = np.random.default_rng(0).normal(size=(8, 5)).astype(np.float32)
    read = msgpack_numpy.unpackb(pack({'actions': actions, 'ms': np.float32(1.5), 'inner': {'n': 3}}))
    assert np.array_equal(read['actions'], actions) and read['actions'].dtype == np.float32
    assert read['ms'] == np.float32(1.5) and read['inner'] == {'n': 3}


def test_scalars_of_the_client_arrive_as_numbers():
    assert unpack(msgpack_numpy.packb({'step': np.int64(3), 'text': np.str_('go')})) == {'step': 3, 'text': 'go'}


class Armed:
    def __reduce__(self):
        return (pytest.fail, ('a pickle was opened',))


def array(data=b'', dtype='<f4', shape=(0,)):
    return msgpack.packb({'state': {b'__ndarray__': True, b'data': data, b'dtype': dtype, b'shape': shape}})


@pytest.mark.parametrize('frame', [
    b'', b'\xc1', b'not msgpack', 'text', msgpack.packb([1, 2]), msgpack.packb(3), pickle.dumps(Armed()),
    array(pickle.dumps(Armed()), '|O', [1]), array(bytes(8), 'O', [1]), array(bytes(8), [['a', '<f4']], [2]),
    array(bytes(8), 'f4,f4', [1]), array(bytes(8), '<M8[ns]', [1]), array(bytes(8), '<f4', [3]),
    array(bytes(8), '<f4', 2),
    array(bytes(8), '<f4', [-1, -2]), array(b'', '<f4', [0, 2**62, 2**62]), array(bytes(8), '<f4', [2**63]),
    array(8, '<f4', [2]), array(bytes(8), None, [2]), array(bytes(8), '<f4', [1] * 40 + [2]),
    msgpack.packb({'state': [0] * 5000}), msgpack.packb({str(n): n for n in range(1000)}),
    msgpack.packb({'a': 'x' * 70000}),
    msgpack.packb({'a': msgpack.ExtType(4, b'1')}), b'\x81\xa1a' + b'\x91' * 100000,
])
def test_what_is_no_request_is_refused_in_one_sentence(frame):
    with pytest.raises(ObservationError, match='the request is'):
        unpack(frame)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_map_or_a_refusal(frame):
    with suppress(ObservationError):
        assert isinstance(unpack(frame), dict)
