# SPDX-License-Identifier: Apache-2.0
"""Run a node as a process that ends well: by Ctrl-C, by a supervisor, after a fatal error."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future as Work
from typing import Any, NoReturn

import rclpy
from rclpy.exceptions import NameValidationException, ParameterException
from rclpy.executors import ExternalShutdownException, SingleThreadedExecutor
from rclpy.impl.implementation_singleton import rclpy_implementation
from rclpy.signals import SignalHandlerOptions
from rclpy.task import Future

from rmuscle_core.errors import RMuscleError

EXIT_S = 3.0  # supervisors lose patience after 5
# ParameterException: of rclpy's own parameters, which it declares before ours are looked at
BAD_ARGUMENTS = (rclpy_implementation.RCLError, rclpy_implementation.UnknownROSArgsError, NameValidationException,
                 ParameterException)


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM."""


def run(make_node: Callable[[], Any], args: list[str] | None = None) -> NoReturn:
    """Spin a node until SIGINT or SIGTERM and end the process: 0, 1 after a fatal device error, 2 for bad arguments.

    The node closes before ROS shuts down, so that a last message (hold) still goes out; hence our own signal handling.
    Closing takes EXIT_S at most, then the process ends as it is.
    """
    signalled = False

    def interrupt(signum: int, _frame: Any) -> None:
        nonlocal signalled
        signalled = True
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not cut the teardown short
        # Only what may take long is cut off. Elsewhere the loop below sees the flag in time, and an exception would hit
        # rclpy at any instruction, even in the middle of making an object.
        if node is None or getattr(node, 'in_transition', False):
            raise Interrupted

    node, executor, code = None, None, 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, interrupt)
        rclpy.init(args=args, signal_handler_options=SignalHandlerOptions.NO)
        executor = SingleThreadedExecutor()
        node = make_node()
        executor.add_node(node)
        while rclpy.ok() and not node.fatal and not signalled:
            executor.spin_once(timeout_sec=0.1)
        code = int(node.fatal)
    except (Interrupted, ExternalShutdownException):
        code = 0
    except Exception as error:
        if signalled:  # rclpy turns what a handler raises inside take_message into a RuntimeError
            code = 0
        elif isinstance(error, RMuscleError):
            print(error, file=sys.stderr)
            code = 2
        elif node is None and isinstance(error, BAD_ARGUMENTS):
            print('the arguments after --ros-args cannot be used:', *str(error).split(), file=sys.stderr)
            code = 2
        else:
            raise
    finally:
        _end_by(EXIT_S, code)
        if node is not None:
            _close(node, executor)
        rclpy.try_shutdown()
    # The interpreter's own teardown takes torch seconds, and crashes under a thread that is still in native code.
    _end(code)


def _close(node: Any, executor: SingleThreadedExecutor) -> None:
    try:
        node.close()
    except Exception as error:  # noqa: BLE001 - a call that does not return, a lost device: the process ends anyway
        node.get_logger().warning(f'not everything was freed: {error}')
    executor.shutdown()
    node.destroy_node()


def _end_by(seconds: float, code: int) -> None:
    """End the process after that time, whatever hangs; what it was writing is left as after a power cut."""
    timer = threading.Timer(seconds, _end, [code])
    timer.daemon = True
    timer.start()


def _end(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


async def finished(executor: Any, work: Work) -> Any:
    """Await work of another thread in a service callback; the executor goes on with other callbacks meanwhile."""
    done = Future(executor=executor)
    work.add_done_callback(lambda _: executor.create_task(done.set_result, None))
    await done
    return work.result()
