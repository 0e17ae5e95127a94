# SPDX-License-Identifier: Apache-2.0
"""The node's services: ~/start, ~/stop, ~/reset_episode, ~/save_episode and ~/reload_library."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future as Work
from typing import TYPE_CHECKING, Any

from rclpy.callback_groups import ReentrantCallbackGroup
from std_srvs.srv import SetBool, Trigger

from rmuscle_core.errors import RMuscleError
from rmuscle_ros.spin import finished

if TYPE_CHECKING:
    from rmuscle_ros.node import PolicyNode


class Services:
    """Answers on the executor thread; what takes longer is awaited there, and done on another."""

    def __init__(self, node: PolicyNode):
        self._node = node
        node.create_service(Trigger, '~/start', self._on_start)
        node.create_service(Trigger, '~/stop', self._on_stop)
        # A callback that awaits keeps its group busy; in the default group it would hold up every other callback.
        waiting = ReentrantCallbackGroup()
        node.create_service(Trigger, '~/reset_episode', self._on_reset, callback_group=waiting)
        node.create_service(Trigger, '~/reload_library', self._on_reload, callback_group=waiting)
        node.create_service(SetBool, '~/save_episode', self._on_save, callback_group=waiting)

    def _on_start(self, _request: Any, response: Any) -> Any:
        label = self._node.state_label
        response.success = label == 'active'
        response.message = 'started' if response.success else f'the node is {label}; activate it first'
        if response.success:
            self._node.start_calls()
        return response

    def _on_stop(self, _request: Any, response: Any) -> Any:
        problem = self._node.stop_calls()
        response.success, response.message = not problem, f'no further chunk, but {problem}' if problem else 'stopped'
        return response

    async def _on_reset(self, _request: Any, response: Any) -> Any:
        return await self._answer(response, self._node.begin_episode, lambda _: 'a new episode begins')

    async def _on_reload(self, _request: Any, response: Any) -> Any:
        return await self._answer(response, self._node.reload_library, lambda count: f'{count} episodes')

    async def _on_save(self, request: Any, response: Any) -> Any:
        return await self._answer(response, lambda: self._node.save_episode(request.data), str)

    async def _answer(self, response: Any, begin: Callable[[], Work], describe: Callable[[Any], str]) -> Any:
        """Fill a service response from work on another thread, without keeping the executor waiting."""
        try:
            if not self._node.configured:
                raise RMuscleError(f'the node is {self._node.state_label}; configure it first')
            result: Any = begin()
            while isinstance(result, Work):  # the inference thread may pass work on to the reconstruct thread
                result = await finished(self._node.executor, result)
            response.success, response.message = True, describe(result)
        except Exception as error:  # noqa: BLE001 - an exception would end the executor
            self._node.complain(error, 'service')
            response.success, response.message = False, self._node.last_error
        return response
