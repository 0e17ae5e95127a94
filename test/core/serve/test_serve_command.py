# SPDX-License-Identifier: Apache-2.0
"""``rmuscle serve`` as a process: it says where it listens, answers the real client, and ends on SIGTERM."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys

import numpy as np
import pytest
from tiny_policy import JOINTS, WAIT_S

from rmuscle_core.cli import DATA, USAGE, main

client = pytest.importorskip('openpi_client.websocket_client_policy', reason='pip install --no-deps openpi-client')


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_serve_until_a_signal(tiny_checkpoint, number):
    command = [sys.executable, '-m', 'rmuscle_core.cli', 'serve', '--checkpoint', tiny_checkpoint, '--port', '0',
               '--prompt', 'lift the cube', '--camera', 'base=cams/ceiling', '--masked-camera', 'wrist',
               '--state-key', 'arm', 'hand', '--profile', 'slow']
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith('listening on 127.0.0.1:')
            robot = client.WebsocketClientPolicy('127.0.0.1', int(line.rpartition(':')[2]))
            answer = robot.infer({'cams': {'ceiling': np.zeros((20, 30, 3), np.uint8)}, 'arm': np.zeros(JOINTS - 1),
                                  'hand': 0.5})
            assert answer['actions'].shape == (8, JOINTS)
            process.send_signal(number)
            assert process.wait(WAIT_S) == 0
        finally:
            process.kill()


@pytest.mark.parametrize(('options', 'sentence'), [
    (['--camera', 'base'], 'must be two names'), (['--camera', 'ceiling=x'], "camera 'ceiling' is not one"),
    (['--masked-camera', 'ceiling'], 'not a camera of the checkpoint'), (['--execute-steps', '9'], 'expected 1 to 8'),
    (['--control-rate-hz', '0'], 'above 0'), (['--window', '99'], 'window must lie in')])
def test_options_that_do_not_fit_are_refused(tiny_checkpoint, capsys, options, sentence):
    assert main(['serve', '--checkpoint', str(tiny_checkpoint), *options]) == USAGE
    assert sentence in capsys.readouterr().err


def test_a_taken_port_is_named(tiny_checkpoint, capsys):
    with socket.create_server(('127.0.0.1', 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(['serve', '--checkpoint', str(tiny_checkpoint), '--port', port]) == DATA
    assert f'cannot listen on 127.0.0.1 port {port}' in capsys.readouterr().err
