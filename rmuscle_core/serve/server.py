# SPDX-License-Identifier: Apache-2.0
"""The websocket server: one event loop for all connections, one thread for the policy.

Protocol of openpi's WebsocketPolicyServer: the first frame is the metadata; then each binary frame is a request and is
answered by one binary frame; a failure is a text frame, after which the connection is closed. ``/healthz`` answers 200.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed, ConnectionClosedError
from websockets.frames import CloseCode
from websockets.http11 import Request, Response

from rmuscle_core import __version__
from rmuscle_core.errors import DeviceError, RMuscleError
from rmuscle_core.observation import ActionChunk, Observation
from rmuscle_core.policy import MusclePolicy
from rmuscle_core.serve.episodes import EpisodeCalls
from rmuscle_core.serve.request import RequestMap
from rmuscle_core.serve.wire import MAX_BYTES, pack, unpack

log = logging.getLogger(__name__)


class PolicyServer:
    """Serves a policy warmed up with ``requests.prompt``, until ``stop`` is called or the device has failed.

    interval_s: time between two calls of a robot, before its own has been measured.
    """

    def __init__(self, policy: MusclePolicy, requests: RequestMap, interval_s: float) -> None:
        self._requests, self._interval_s = requests, interval_s
        self._calls = EpisodeCalls(policy, requests.prompt)
        config = policy.config
        self._metadata = {
            'server': f'rmuscle {__version__}', 'policy': config.kind, 'cameras': list(policy.cameras),
            'state_dim': config.state_dim, 'action_dim': config.action_dim, 'action_horizon': config.chunk_size,
            'execute_steps': policy.execute_steps}
        self._inference = ThreadPoolExecutor(1, 'inference')  # one worker: requests are answered as they came
        self._stop = asyncio.Event()
        self._failure: DeviceError | None = None

    async def run(self, host: str, port: int, listening: Callable[[int], None] = lambda port: None) -> None:
        """Serve until stopped; listening(port) is called once connections are accepted. Raises DeviceError, OSError."""
        # Browsers name an origin, robots do not: no web page may drive a policy on its visitor's machine.
        server: Server = await serve(self._converse, host, port, compression=None, max_size=MAX_BYTES, max_queue=2,
                                     origins=[None], process_request=_health)
        try:
            listening(server.sockets[0].getsockname()[1])
            await self._stop.wait()
        finally:
            server.close()
            await server.wait_closed()
            await asyncio.to_thread(self._inference.shutdown, cancel_futures=True)  # the call under way ends
        if self._failure:
            raise self._failure

    def stop(self) -> None:
        """Close all connections and return from ``run``; to be called on the event loop."""
        self._stop.set()

    async def _converse(self, connection: ServerConnection) -> None:
        try:
            await connection.send(pack(self._metadata))
            await self._answer_all(connection)
        except ConnectionClosed:
            pass
        except RMuscleError as error:
            log.warning('%s: %s', connection.remote_address, error)
            await _fail(connection, str(error))
            self._end_if_lost(error)
        except Exception:  # whatever the policy raises costs one connection, never the server
            log.exception('%s: request failed', connection.remote_address)
            await _fail(connection, traceback.format_exc())
        finally:
            self._afterwards(self._calls.leave, connection.id)

    async def _answer_all(self, connection: ServerConnection) -> None:
        intervals: deque[float] = deque(maxlen=4)
        answered, total_ms = None, None
        async for frame in connection:
            received = time.monotonic()
            if answered is not None:
                intervals.append(received - answered)
            observation, begins = await asyncio.to_thread(self._read, frame)
            asked = time.monotonic()
            chunk = await self._inferred(connection, observation, begins)
            timing = {'infer_ms': 1e3 * (time.monotonic() - asked)}
            if total_ms is not None:
                timing['prev_total_ms'] = total_ms
            await connection.send(pack(_response(chunk, timing)))
            answered = time.monotonic()
            total_ms = 1e3 * (answered - received)
            # Too long an estimate costs nothing, the next request ends the interval; too short a one wastes it.
            self._afterwards(self._calls.published, connection.id, max(intervals, default=self._interval_s))

    def _read(self, frame: bytes | str) -> tuple[Observation, bool]:
        request = unpack(frame)
        return self._requests.observation(request), request.get('reset') is True

    async def _inferred(self, connection: ServerConnection, observation: Observation, begins: bool) -> ActionChunk:
        """The answer of the inference thread; a call that waits for its turn is withdrawn when its client is gone."""
        result = asyncio.get_running_loop().run_in_executor(
            self._inference, self._calls.infer, connection.id, observation, begins)
        gone = asyncio.ensure_future(connection.wait_closed())
        await asyncio.wait((result, gone), return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not result.done():
            result.cancel()
            raise ConnectionClosedError(None, None)
        return result.result()

    def _afterwards(self, job: Callable[..., None], *arguments: Any) -> None:
        """Queue a job that nobody waits for."""
        loop = asyncio.get_running_loop()
        self._inference.submit(job, *arguments).add_done_callback(
            lambda done: None if done.cancelled() else loop.call_soon_threadsafe(self._ended, done.exception()))

    def _ended(self, error: BaseException | None) -> None:
        if error is not None:
            log.error('after a policy call', exc_info=error)
            self._end_if_lost(error)

    def _end_if_lost(self, error: BaseException) -> None:
        if isinstance(error, DeviceError):
            self._failure = error
            self.stop()


def _response(chunk: ActionChunk, timing: dict[str, float]) -> dict[str, Any]:
    report = chunk.report
    return {'actions': chunk.actions, 'server_timing': timing, 'policy_timing': dict(report.milliseconds),
            'cache': {name: getattr(report, name) for name in ('mode', 'path', 'reason', 'reference', 'similarity')}}


async def _fail(connection: ServerConnection, reason: str) -> None:
    try:
        await connection.send(reason)
        await connection.close(CloseCode.INTERNAL_ERROR, 'the reason is in the text frame before')
    except ConnectionClosed:
        pass


def _health(connection: ServerConnection, request: Request) -> Response | None:
    return connection.respond(HTTPStatus.OK, 'OK\n') if request.path == '/healthz' else None
