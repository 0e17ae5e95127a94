# SPDX-License-Identifier: Apache-2.0
"""Run a node as a process that ends well: by Ctrl-C, by a supervisor, after a fatal error."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from concurrent.futures import Future as Work
from typing import Any

import rclpy
from rclpy.executors import ExternalShutdownException, SingleThreadedExecutor
from rclpy.signals import SignalHandlerOptions
from rclpy.task import Future

from rmuscle_core.errors import RMuscleError


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM."""


def run(make_node: Callable[[], Any], args: list[str] | None = None) -> int:
    """Spin a node until SIGINT or SIGTERM; exit code 0, 1 after a fatal device error, 2 for a bad parameter.

    The node closes before ROS shuts down, so that a last message (hold) still goes out; hence our own signal handling.
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

    rclpy.init(args=args, signal_handler_options=SignalHandlerOptions.NO)
    node, executor = None, SingleThreadedExecutor()
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, interrupt)
        node = make_node()
        executor.add_node(node)
        while rclpy.ok() and not node.fatal and not signalled:
            executor.spin_once(timeout_sec=0.1)
        return 1 if node.fatal else 0
    except (Interrupted, ExternalShutdownException):
        return 0
    except Exception as error:
        if signalled:  # rclpy turns what a handler raises inside take_message into a RuntimeError
            return 0
        if not isinstance(error, RMuscleError):
            raise
        print(error, file=sys.stderr)
        return 2
    finally:
        if node is not None:
            _close(node, executor)
        rclpy.try_shutdown()


def _close(node: Any, executor: SingleThreadedExecutor) -> None:
    try:
        node.close()
    except RMuscleError as error:  # a policy call that does not return; its daemon thread ends with the process
        node.get_logger().warning(str(error))
    executor.shutdown()
    node.destroy_node()


async def finished(executor: Any, work: Work) -> Any:
    """Await work of another thread in a service callback; the executor goes on with other callbacks meanwhile."""
    done = Future(executor=executor)
    work.add_done_callback(lambda _: executor.create_task(done.set_result, None))
    await done
    return work.result()
