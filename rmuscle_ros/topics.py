# SPDX-License-Identifier: Apache-2.0
"""The topics of a configured node: their QoS, which parameters can override, and what does not fit it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import TYPE_CHECKING, Any

from rclpy.event_handler import SubscriptionEventCallbacks, UnsupportedEventTypeError
from rclpy.exceptions import InvalidParameterTypeException, InvalidParameterValueException
from rclpy.qos import (
    DurabilityPolicy,
    QoSCompatibility,
    QoSProfile,
    ReliabilityPolicy,
    qos_check_compatible,
    qos_policy_name_from_kind,
)
from rclpy.qos_overriding_options import QoSOverridingOptions

from rmuscle_core.errors import SettingsError

if TYPE_CHECKING:
    from rmuscle_ros.lifecycle import RetryableLifecycleNode

COMMAND = QoSProfile(depth=1, reliability=ReliabilityPolicy.RELIABLE)  # a late joiner must not replay motion
REPORT = QoSProfile(depth=10, reliability=ReliabilityPolicy.RELIABLE)
IMAGE = QoSProfile(depth=1, reliability=ReliabilityPolicy.BEST_EFFORT)  # best effort accepts any publisher
JOINTS = QoSProfile(depth=5, reliability=ReliabilityPolicy.BEST_EFFORT)
PROMPT = QoSProfile(depth=1, reliability=ReliabilityPolicy.RELIABLE, durability=DurabilityPolicy.TRANSIENT_LOCAL)


@contextmanager
def _overridden(topic: str) -> Iterator[None]:
    """What the middleware refuses while a topic is made is the user's: the rest of its profile is ours."""
    try:
        yield
    except (InvalidParameterTypeException, InvalidParameterValueException, RuntimeError) as error:
        raise SettingsError(f'{topic} cannot be made with its qos_overrides: {error}; config/qos.yaml is an example'
                            ) from error


class Topics:
    """Publishers and subscriptions that configure makes and cleanup destroys.

    A profile is copied, as rclpy writes what parameters override into the one it gets.
    ``lost`` counts the messages that the middleware reports lost on the way.
    """

    def __init__(self, node: RetryableLifecycleNode):
        self._node = node
        self._entities: list[tuple[Callable, Any]] = []  # (how to destroy it, entity)
        self._expected: dict[str, tuple[Any, str]] = {}  # topic -> its subscription, the type subscribed
        self._published: dict[str, str] = {}  # topic -> its full name
        self._incompatible: dict[str, str] = {}  # topic -> what a publisher offered otherwise than asked
        self.lost: Counter[str] = Counter()

    def publisher(self, kind: type, topic: str, qos: QoSProfile) -> Any:
        """A publisher that is silent while the node is not active."""
        with _overridden(topic):
            publisher = self._node.create_lifecycle_publisher(
                kind, topic, copy(qos), qos_overriding_options=QoSOverridingOptions.with_default_policies())
        self._entities.append((self._node.destroy_lifecycle_publisher, publisher))
        self._published[topic] = publisher.topic_name
        return publisher

    def subscribe(self, kind: type, topic: str, qos: QoSProfile, callback: Callable) -> None:
        """callback(message) runs on the executor thread; what it raises is logged."""
        def incompatible(event: Any) -> None:
            policy = qos_policy_name_from_kind(event.last_policy_kind)
            asked, *offered = (getattr(profile, policy.lower()) for profile in (
                subscription.qos_profile,
                *(info.qos_profile for info in self._node.get_publishers_info_by_topic(subscription.topic_name))))
            others = sorted({getattr(value, 'name', str(value)) for value in offered if value != asked})
            text = (f'a publisher on {topic} offers {policy} {", ".join(others) or "otherwise"}, asked for is '
                    f'{getattr(asked, "name", asked)}; see qos_overrides')
            self._incompatible[topic] = text
            self._node.get_logger().warning(text)

        def lost(event: Any) -> None:
            self.lost[topic] += event.total_count_change

        def create(**events: Callable) -> Any:
            return self._node.create_subscription(
                kind, topic, self._node.guarded(callback), copy(qos), event_callbacks=SubscriptionEventCallbacks(
                    incompatible_qos=self._node.guarded(incompatible), **events),
                qos_overriding_options=QoSOverridingOptions.with_default_policies())

        with _overridden(topic):
            try:
                subscription = create(message_lost=self._node.guarded(lost))
            except UnsupportedEventTypeError:
                subscription = create()  # not every middleware counts what it loses
        self._entities.append((self._node.destroy_subscription, subscription))
        self._expected[topic] = subscription, f'{kind.__module__.partition(".")[0]}/msg/{kind.__name__}'

    def misfits(self) -> dict[str, str]:
        """Topics with a publisher that offers another QoS than asked, and what; those that went are left out."""
        def unfit(subscription: Any) -> bool:
            offered = self._node.get_publishers_info_by_topic(subscription.topic_name)
            return any(qos_check_compatible(info.qos_profile, subscription.qos_profile)[0] == QoSCompatibility.ERROR
                       for info in offered)
        return {topic: text for topic, text in self._incompatible.items() if unfit(self._expected[topic][0])}

    def foreign(self, topic: str) -> str:
        """What other type a topic's publishers send, empty if none; the middleware keeps silent about it."""
        subscription, expected = self._expected[topic]
        others = {info.topic_type for info in self._node.get_publishers_info_by_topic(subscription.topic_name)}
        others -= {expected}
        return f'a publisher on {topic} sends {", ".join(sorted(others))}, expected {expected}' if others else ''

    def ends(self, topic: str) -> tuple[str, int, int]:
        """Full name of a topic published here, and how many publish and subscribe it, this node included."""
        name = self._published[topic]
        return name, self._node.count_publishers(name), self._node.count_subscribers(name)

    def close(self) -> None:
        """Destroy them all."""
        for destroy, entity in self._entities:
            destroy(entity)
        self._entities.clear()
        self._expected.clear()
        self._published.clear()
        self._incompatible.clear()
