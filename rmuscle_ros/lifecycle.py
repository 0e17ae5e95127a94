# SPDX-License-Identifier: Apache-2.0
"""A lifecycle node that survives wrong requests and says why something failed."""

from __future__ import annotations

import functools
import inspect
import re
import time
import traceback
from collections.abc import Callable
from typing import Any

from rclpy.impl.implementation_singleton import rclpy_implementation
from rclpy.lifecycle import LifecycleNode, TransitionCallbackReturn

from rmuscle_core.errors import DeviceError, RMuscleError

LOG_PERIOD_S = 5.0
NUMBER = re.compile(r'(?<![\w/])[-+]?\d[\d.]*')  # not one that belongs to a name, as in j1 or /camera0


class RetryableLifecycleNode(LifecycleNode):
    """LifecycleNode whose failed transitions leave the former state, ready for another try.

    ``fatal``: the device has failed for good, the process has to end; spin.run watches it.
    """

    def __init__(self, name: str, **kwargs: Any):
        self.last_error, self.fatal = '', False
        self.in_transition = False  # a transition may take long, loading weights; spin.run cuts it off on a signal
        self._complained: dict[tuple[str, str], float] = {}
        super().__init__(name, **kwargs)

    def _LifecycleNodeMixin__change_state(self, transition_id: int) -> TransitionCallbackReturn:
        # On Jazzy a request that does not fit the state (activate while unconfigured) raises out of spin() and ends the
        # process. The mangled name is the only place where both the services and the trigger_* methods pass.
        try:
            return super()._LifecycleNodeMixin__change_state(transition_id)
        except rclpy_implementation.RCLError:
            label = self._state_machine.current_state[1]
            self.get_logger().error(f'transition {transition_id} is not possible in state {label}; '
                                    '`ros2 lifecycle list` shows those that are')
            return TransitionCallbackReturn.ERROR

    def create_service(self, srv_type: type, srv_name: str, callback: Callable, **options: Any) -> Any:
        """As rclpy's, which ends spin() and the node at what a callback raises, its own parameter services' included (a
        value of an unknown type): here that is logged and the answer is empty. A coroutine has to see to it itself.
        """
        @functools.wraps(callback)
        def answered(request: Any, response: Any) -> Any:
            try:
                return callback(request, response)
            except Exception as error:  # noqa: BLE001 - see above
                self.complain(error, srv_name)
                return srv_type.Response()
        waits = inspect.iscoroutinefunction(callback)
        return super().create_service(srv_type, srv_name, callback if waits else answered, **options)

    def destroy_node(self) -> None:
        """Also end the lifecycle services: rclpy leaves them, and the node in the graph, to the garbage collector."""
        super().destroy_node()
        self._state_machine.destroy_when_not_in_use()

    @property
    def state_label(self) -> str:
        """unconfigured, inactive, active or finalized."""
        return self._state_machine.current_state[1]

    def complain(self, error: Exception, where: str, in_full: bool = False) -> None:
        """Log an exception and keep it as ``last_error``; callable from any thread.

        A refusal is one sentence; anything unforeseen comes with its traceback. The same complaint (up to its first
        colon, where the topic stands, and whatever its numbers) is logged once in LOG_PERIOD_S. ``in_full``: always,
        and with the traceback.
        """
        self.fatal = self.fatal or isinstance(error, DeviceError)
        foreseen = isinstance(error, RMuscleError)
        text = str(error) if foreseen else f'{type(error).__name__}: {error}'
        self.last_error = ' '.join(text.split())  # one line, for ~/status and /diagnostics
        key, now = (where, NUMBER.sub('#', self.last_error.partition(':')[0])), time.monotonic()
        if not in_full and now - self._complained.get(key, -LOG_PERIOD_S) < LOG_PERIOD_S:
            return
        self._complained[key] = now
        self.get_logger().error(f'{where}: {self.last_error}')
        if in_full or not foreseen:
            self.get_logger().error(''.join(traceback.format_exception(type(error), error, error.__traceback__)))

    def guarded(self, callback: Callable) -> Callable:
        """Return the callback with exceptions logged instead of raised: one that escapes ends spin() and the node.
        """
        @functools.wraps(callback)
        def wrapped(*arguments):
            try:
                return callback(*arguments)
            except Exception as error:  # noqa: BLE001 - see above
                self.complain(error, callback.__name__)
        return wrapped


def transition(method: Callable) -> Callable:
    """Wrap an ``on_*`` method that returns nothing: SUCCESS, or reason and traceback in the log and FAILURE.

    rclpy swallows what a transition raises without a word, so this is where it comes to light.
    """
    @functools.wraps(method)
    def wrapped(self, state):
        self.in_transition = True
        try:
            method(self, state)
        except Exception as error:  # noqa: BLE001 - see above
            self.complain(error, method.__name__, in_full=True)
            return TransitionCallbackReturn.FAILURE
        finally:
            self.in_transition = False
        self.last_error = ''
        return TransitionCallbackReturn.SUCCESS
    return wrapped
