# SPDX-License-Identifier: Apache-2.0
"""rosbag2 recordings (mcap or sqlite3) without ROS: topics by name, messages by their own stamps."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rosbags.highlevel import AnyReader
from rosbags.typesys import Stores, get_typestore

from rmuscle_core.errors import EpisodeError, RMuscleError, SettingsError, reason
from rmuscle_core.sensing.samples import header_ns

REORDER_NS = 1_000_000_000  # a message may be recorded this much later than one with a younger stamp


@dataclass(frozen=True)
class Topics:
    """Names in a bag. renamed: relative name -> full topic. episodes: each message begins an episode; '' for none."""

    renamed: Mapping[str, str] = field(default_factory=dict)
    joints: str = 'joint_states'
    prompt: str = 'prompt'
    episodes: str = ''

    def find(self, name: str, recorded: Collection[str], bag: Path) -> str | None:
        """The bag's topic for a name: itself if absolute, else under any namespace; None if there is none.

        Raises SettingsError when several are called so.
        """
        name = self.renamed.get(name, name)
        if name.startswith('/') or f'/{name}' in recorded:
            full = f'/{name.lstrip("/")}'
            return full if full in recorded else None
        found = sorted(topic for topic in recorded if topic.endswith(f'/{name}'))
        if len(found) > 1:
            raise SettingsError(f'bag {bag} has {name} as {" and ".join(found)}; choose one with --topic {name}=TOPIC')
        return found[0] if found else None

    def require(self, name: str, recorded: Collection[str], bag: Path) -> str:
        """As ``find``, but EpisodeError when there is none."""
        topic = self.find(name, recorded, bag)
        if topic is None:
            option = '--episodes-topic TOPIC' if name == self.episodes else f'--topic {name}=TOPIC'
            raise EpisodeError(f'bag {bag} has no topic {self.renamed.get(name, name)} (it has '
                               f'{", ".join(sorted(recorded)) or "none"}); name it with {option}')
        return topic


@contextmanager
def opened(bag: Path) -> Iterator[AnyReader]:
    """An open bag; whatever its reader raises becomes an EpisodeError with the way to repair it."""
    try:
        with AnyReader([bag], default_typestore=get_typestore(Stores.ROS2_JAZZY)) as reader:
            yield reader
    except RMuscleError:
        raise
    except Exception as error:  # a damaged bag breaks its reader in any way
        raise EpisodeError(f'bag {bag} cannot be read ({reason(error)}); if its recording was not '
                           'finished, repair it with "mcap recover" or "ros2 bag reindex"') from error


def in_header_order(reader: AnyReader, topics: Collection[str], start: int | None = None, stop: int | None = None,
                    ) -> Iterator[tuple[str, Any, int]]:
    """(topic, message, stamp in ns) of what was recorded in [start, stop) ns, by header stamp.

    Holds back as much as a second of messages to sort them.
    """
    connections = [connection for connection in reader.connections if connection.topic in topics]
    waiting: list[tuple[int, int, str, Any]] = []
    newest_ns = 0
    for number, (connection, time_ns, raw) in enumerate(reader.messages(connections, start, stop)):
        message = reader.deserialize(raw, connection.msgtype)
        stamp_ns = header_ns(message, time_ns)
        newest_ns = max(newest_ns, stamp_ns)
        heapq.heappush(waiting, (stamp_ns, number, connection.topic, message))
        while waiting[0][0] < newest_ns - REORDER_NS:
            yield _released(waiting)
    while waiting:
        yield _released(waiting)


def _released(waiting: list[tuple[int, int, str, Any]]) -> tuple[str, Any, int]:
    stamp_ns, _, topic, message = heapq.heappop(waiting)
    return topic, message, stamp_ns
