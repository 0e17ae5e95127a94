# SPDX-License-Identifier: Apache-2.0
"""A policy server in this process, on a free port, with its event loop on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager

import numpy as np
import pytest
from tiny_policy import CAMERAS, PROMPT, WAIT_S

from rmuscle_core.serve.request import RequestMap
from rmuscle_core.serve.server import PolicyServer


@pytest.fixture
def serving():
    """serving(policy): a context that yields the port; whatever the server raised is raised by its end."""
    @contextmanager
    def serve(policy, interval_s=0.2):
        listening, result = threading.Event(), {}

        async def main():
            server = PolicyServer(policy, RequestMap.build(CAMERAS, {}, (), PROMPT), interval_s)
            result.update(loop=asyncio.get_running_loop(), server=server)

            def started(port):
                result['port'] = port
                listening.set()
            await server.run('127.0.0.1', 0, started)

        def run():
            try:
                asyncio.run(main())
            except Exception as error:  # noqa: BLE001 - raised where the context ends
                result['error'] = error
            finally:
                listening.set()

        thread = threading.Thread(target=run)
        thread.start()
        assert listening.wait(WAIT_S) and 'port' in result, result.get('error')
        try:
            yield result['port']
        finally:
            if thread.is_alive():
                result['loop'].call_soon_threadsafe(result['server'].stop)
            thread.join(WAIT_S)
        assert not thread.is_alive()
        if 'error' in result:
            raise result['error']

    return serve


@pytest.fixture(scope='session')
def request_of():
    """request_of(observation): what an openpi client sends for it."""
    def make(observation):
        return {**{f'observation/{camera}': np.asarray(picture) for camera, picture in observation.images.items()},
                'observation/state': observation.state, 'prompt': observation.prompt}
    return make
