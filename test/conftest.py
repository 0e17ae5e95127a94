# SPDX-License-Identifier: Apache-2.0
"""Environment of every test: one thread, the Triton interpreter without a GPU, a ROS graph of its own."""

from __future__ import annotations

import os
import random
from importlib.util import find_spec

# All of this before anything imports triton or rclpy, which read it once.
os.environ.setdefault('OMP_NUM_THREADS', '1')
os.environ.setdefault('MUJOCO_GL', 'osmesa')
# Nobody else's nodes in the tests, nor the tests' nodes on anybody's robot; child processes inherit both.
os.environ['ROS_AUTOMATIC_DISCOVERY_RANGE'] = 'LOCALHOST'
os.environ['ROS_DOMAIN_ID'] = str(random.randint(1, 100))  # higher ones meet Linux's ephemeral ports

import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ['TRITON_INTERPRET'] = '1'

import pytest

torch.set_num_threads(1)
if find_spec('hypothesis'):
    from hypothesis import settings

    settings.register_profile('here', deadline=None)  # a busy machine is no fault
    settings.load_profile('here')

MISSING_ROS = [name for name in ('rclpy', 'rmuscle') if find_spec(name) is None]
collect_ignore = ['ros'] if MISSING_ROS else []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    for item in items:
        if not CUDA and item.get_closest_marker('gpu'):
            item.add_marker(pytest.mark.skip(reason='needs a CUDA device'))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say that the ROS tests did not run, so that a green run is not mistaken for more than it is."""
    if MISSING_ROS:
        terminalreporter.write_line(f'test/ros left out: cannot import {" and ".join(MISSING_ROS)}; '
                                    'scripts/test makes an environment that can')


@pytest.fixture(scope='session')
def ros_context():
    """Initialise rclpy's default context once; yields it."""
    rclpy = pytest.importorskip('rclpy')
    from rclpy.signals import SignalHandlerOptions
    rclpy.init(signal_handler_options=SignalHandlerOptions.NO)  # Ctrl-C stops pytest, not the context under it
    yield rclpy.get_default_context()
    rclpy.try_shutdown()
