# SPDX-License-Identifier: Apache-2.0
"""ROS 2 bags as episodes, through the buffer that the policy node observes with.

A bag is one episode. A topic whose every message begins an episode may divide it, and a clock that jumps back does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rmuscle_core.errors import EpisodeError, ObservationError, RMuscleError, SettingsError
from rmuscle_core.importing.bag_file import REORDER_NS, Topics, in_header_order, opened
from rmuscle_core.importing.episodes import PendingEpisode, Wanted, file_name
from rmuscle_core.importing.robot import Robot
from rmuscle_core.library.recording import RecordedEpisode
from rmuscle_core.observation import Observation
from rmuscle_core.sensing.observe import ObservationBuffer
from rmuscle_core.sensing.samples import header_ns

JUMP_NS = 1_000_000_000  # a stamp further back than this comes from a clock that was set back


class Span(NamedTuple):
    """Part of a bag by recording time, [start, stop) in ns, None for its ends; and what the robot was told to do."""

    start: int | None
    stop: int | None
    prompt: str


class Bags:
    """Bags as an EpisodeSource. Raises SettingsError when robot, checkpoint and options do not fit, and
    EpisodeError when there is but one bag and it cannot be opened.
    """

    def __init__(self, bags: Sequence[Path], wanted: Wanted, robot: Robot, topics: Topics) -> None:
        wanted = replace(wanted, masked={*wanted.masked, *(set(robot.masked) & set(wanted.cameras))})
        self._image_topics = {camera: robot.topics[name] for camera, name in
                              wanted.camera_map(robot.topics, 'the parameter file').items()}
        self.cameras = tuple(self._image_topics)
        if len(robot.joints.names) != wanted.state_dim:
            raise SettingsError(f'joint_names has {len(robot.joints.names)} joints, the state of the checkpoint '
                                f"{wanted.state_dim} values; list the checkpoint's joints in its order")
        known = (topics.joints, topics.prompt, *robot.topics.values())
        unknown = next((name for name in topics.renamed if name not in known), None)
        if unknown:
            raise SettingsError(f'--topic {unknown} names nothing that is read from a bag; expected one of '
                                f'{", ".join(known)}')
        self.joints, self.execute_steps = robot.joints.names, wanted.execute_steps
        self._prompt, self._robot, self._topics, self._bags = wanted.prompt, robot, topics, bags
        step_ns = 1e9 / (wanted.control_rate_hz or robot.control_rate_hz)
        # Half a step is forgiven, so that a camera that jitters does not cost a whole frame.
        if len(bags) == 1:
            with opened(bags[0]):  # now, and not when a policy is loaded
                pass
        self._between_ns = round((wanted.execute_steps - 0.5) * step_ns)

    def __enter__(self) -> Bags:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to close: every episode opens its own bag."""

    def __iter__(self) -> Iterator[PendingEpisode]:
        for bag in self._bags:
            name = file_name(bag.stem if bag.is_file() else bag.resolve().name)
            try:
                spans = self._spans(bag)
            except EpisodeError as error:
                yield PendingEpisode(name, '', partial(_fail, error))
                continue
            for number, span in enumerate(spans):
                part = name if len(spans) == 1 else f'{name}-{number:03d}'
                yield PendingEpisode(part, span.prompt, partial(self._read, bag, part, span))

    def _spans(self, bag: Path) -> list[Span]:
        """Where episodes begin and what was asked for in each, from the bag's small topics."""
        begins: list[int | None] = [] if self._topics.episodes else [None]
        prompts: list[tuple[int, str]] = []
        newest: dict[tuple[str, ...], int] = {}  # stamp for each set of joints: every publisher has a clock of its own
        with opened(bag) as reader:
            recorded = reader.topics
            joints = self._topics.require(self._topics.joints, recorded, bag)
            prompt = self._topics.find(self._topics.prompt, recorded, bag)
            episodes = self._topics.episodes and self._topics.require(self._topics.episodes, recorded, bag)
            connections = [c for c in reader.connections if c.topic in (joints, prompt, episodes)]
            for connection, time_ns, raw in reader.messages(connections):
                if connection.topic == episodes:
                    begins.append(time_ns)
                    newest.clear()
                    continue
                message = reader.deserialize(raw, connection.msgtype)
                if connection.topic == prompt:
                    prompts.append((time_ns, message.data))
                    continue
                publisher, stamp_ns = tuple(message.name), header_ns(message, time_ns)
                if stamp_ns < newest.get(publisher, 0) - JUMP_NS and begins:
                    begins.append(time_ns)
                    newest.clear()
                newest[publisher] = max(stamp_ns, newest.get(publisher, 0))
            starts = [reader.start_time if begin is None else begin for begin in begins]
        told = [self._told(start + REORDER_NS, prompts) for start in starts]
        return [Span(*span) for span in zip(begins, [*begins[1:], None], told)]

    def _told(self, time_ns: int, prompts: list[tuple[int, str]]) -> str:
        """The prompt in force; a latched one is recorded a little after the start."""
        said = next((text for said_ns, text in reversed(prompts) if said_ns <= time_ns), '')
        return self._prompt or said or self._robot.prompt

    def _read(self, bag: Path, name: str, span: Span) -> RecordedEpisode:
        if not span.prompt.strip():
            raise EpisodeError(f'bag {bag} has no prompt, neither on the topic {self._topics.prompt} nor in the '
                               'parameter file; give one with --prompt')
        with opened(bag) as reader:
            recorded = reader.topics
            cameras = {c: self._topics.require(topic, recorded, bag) for c, topic in self._image_topics.items()}
            joints = self._topics.require(self._topics.joints, recorded, bag)
            robot = self._robot
            buffer = ObservationBuffer(robot.joints, cameras, robot.max_age_s, robot.max_skew_s, joints)
            messages = in_header_order(reader, {*cameras.values(), joints}, span.start, span.stop)
            observations, why = observe(buffer, messages, span.prompt, self._between_ns)
        if not observations:
            raise EpisodeError(f'episode {name} of bag {bag} has no instant with fresh samples of all cameras and '
                               f'joints: {why}')
        return RecordedEpisode(name, True, observations)


def observe(buffer: ObservationBuffer, messages: Iterable[tuple[str, Any, int]], prompt: str,
            between_ns: int) -> tuple[list[Observation], str]:
    """What a policy would have been called with: the first observation there is, then always the first one that is
    ``between_ns`` younger; and if there is none, why.

    messages: (topic, message, stamp in ns) in the order of their stamps.
    """
    observations: list[Observation] = []
    refused, missing, not_before_ns = '', 'it has no messages on these topics', 0
    for topic, message, stamp_ns in messages:
        try:
            buffer.add(topic, message, stamp_ns)
            snapshot = buffer.take(prompt, stamp_ns, not_before_ns)
        except ObservationError as error:  # as live, one bad message is passed over
            refused = str(error)
            continue
        if snapshot:
            observations.append(snapshot.observation)
            not_before_ns = snapshot.stamp_ns + between_ns
        elif not observations:
            missing = buffer.problem(stamp_ns)
    return observations, refused or missing


def _fail(error: RMuscleError) -> RecordedEpisode:
    raise error
