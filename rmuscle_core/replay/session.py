# SPDX-License-Identifier: Apache-2.0
"""From a source of episodes to replayed calls: references first, then every other episode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from rmuscle_core.errors import EpisodeError, ObservationError
from rmuscle_core.importing.episodes import PendingEpisode
from rmuscle_core.library.recording import RecordedEpisode
from rmuscle_core.policy import MusclePolicy, task_of
from rmuscle_core.replay.calls import ReplayedCall, replay
from rmuscle_core.replay.measures import half_ranges, per_call_difference, worst_of
from rmuscle_core.settings import Settings


@dataclass
class Replayed:
    """calls: in order. scale: half range of the actions per joint [A]. skipped: (episode, why)."""

    calls: list[ReplayedCall] = field(default_factory=list)
    scale: np.ndarray | None = None
    skipped: list[tuple[str, str]] = field(default_factory=list)


class Session:
    """Two policies of one checkpoint, and the episodes they are shown.

    Without a library the first ``references`` episodes are recorded into a new one below ``out``.
    """

    def __init__(self, checkpoint: Path, settings: Settings, episodes: Sequence[PendingEpisode], executed: int,
                 out: Path, library: Path | None = None, references: int | None = None, device: str = 'cpu',
                 cameras: Sequence[str] = ()) -> None:
        count = references if references is not None else 0 if library else max(1, len(episodes) // 2)
        if not 0 <= count < len(episodes):
            raise EpisodeError(f'{len(episodes)} episodes cannot be split into {count} references and at least one to '
                               'replay; record more, give a --library, or set --references')
        self.references, self.tested, self.executed = episodes[:count], episodes[count:], executed
        options = {'device': device, 'cameras': cameras or None}
        settings = replace(settings, shadow_every=0)  # shown is what the settings do, not what they are saved from
        self.dense = MusclePolicy.load(checkpoint, settings.with_values(mode='dense'), **options)
        self.cached = MusclePolicy.load(checkpoint, settings, library or _new_library(out), need_library=True,
                                        **options)
        for policy in (self.dense, self.cached):
            policy.execute_steps = executed

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.dense.close()
        self.cached.close()

    def prepare(self) -> tuple[list[RecordedEpisode], list[tuple[str, str]]]:
        """Record the references; return the other episodes that fit, read, and which were skipped and why.

        Raises EpisodeError when no reference is left.
        """
        skipped: list[tuple[str, str]] = []
        self._record_references(skipped, lambda: None)
        if not self.cached.library.episodes:
            raise EpisodeError(f'none of the {len(self.references)} episodes that come first can serve as reference '
                               f'({skipped[0][0]}: {skipped[0][1]}); record them again, or leave them out')
        episodes = [episode for pending in self.tested if (episode := self._tested(pending, skipped))]
        return [episode for episode in episodes if self._fits(episode, skipped)], skipped

    def run(self, progress: Callable[[], None] = lambda: None) -> Replayed:
        """Record the references, replay the rest; progress() after every episode."""
        found = Replayed()
        self._record_references(found.skipped, progress)
        for pending in self.tested:
            if episode := self._tested(pending, found.skipped):
                self._replay(episode, found)
            progress()
        return found

    def _tested(self, pending: PendingEpisode, skipped: list[tuple[str, str]]) -> RecordedEpisode | None:
        if any(stored.episode == pending.name for stored in self.cached.library.episodes):
            skipped.append((pending.name, 'it is in the library and would be compared with itself'))
            return None
        return read_or_skip(pending, skipped)

    def _fits(self, episode: RecordedEpisode, skipped: list[tuple[str, str]]) -> bool:
        try:
            for observation in episode.observations:
                self.cached.processor.encode(observation)
        except ObservationError as error:
            skipped.append((episode.name, str(error)))
            return False
        return True

    def _record_references(self, skipped: list[tuple[str, str]], progress: Callable[[], None]) -> None:
        for pending in self.references:
            episode = read_or_skip(pending, skipped)
            if episode and self._fits(episode, skipped):
                self._record(episode)
            progress()
        self.cached.memory.retriever.use(self.cached.library.index())

    def _record(self, episode: RecordedEpisode) -> None:
        task = task_of(episode.observations[0].prompt)
        references = self.cached.record_references(episode.observations, task, episode.name)
        self.cached.library.add_episode(task, references, episode.success, episode.name)

    def _replay(self, episode: RecordedEpisode, found: Replayed) -> None:
        try:
            if found.scale is None:
                found.scale = half_ranges(self.dense, episode.observations[0])
            found.calls += replay(episode, self.dense, self.cached)
        except ObservationError as error:
            found.skipped.append((episode.name, f'{error}; its calls so far count'))
        if found.calls:
            found.calls = _without_pictures(found.calls, per_call_difference(found.calls, self.executed, found.scale))

    def pictures(self, references: Iterable[str]) -> dict[str, Mapping[str, np.ndarray]]:
        """What the cameras saw at each 'task/episode#call' whose episode is at hand; each is read once."""
        calls = {name: name.rpartition('/')[2].partition('#') for name in references}
        found: dict[str, Mapping[str, np.ndarray]] = {}
        for pending in (*self.references, *self.tested):
            wanted = {name: int(call) for name, (episode, _, call) in calls.items() if episode == pending.name}
            observations = episode.observations if wanted and (episode := read_or_skip(pending, [])) else []
            found |= {name: observations[call].images for name, call in wanted.items() if call < len(observations)}
        return found


def read_or_skip(pending: PendingEpisode, skipped: list[tuple[str, str]]) -> RecordedEpisode | None:
    """The episode, or None with the reason added to ``skipped``."""
    try:
        episode = pending.read()
        if not episode.observations:
            raise EpisodeError('it has no observations')
    except (EpisodeError, ObservationError) as error:
        skipped.append((pending.name, str(error)))
        return None
    return episode


def _without_pictures(calls: list[ReplayedCall], per_call: np.ndarray) -> list[ReplayedCall]:
    """Only the worst calls keep their pictures: those of an hour would not fit into memory."""
    worst = worst_of(per_call)
    return [call if i in worst or not call.images else replace(call, images={}) for i, call in enumerate(calls)]


def _new_library(out: Path) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    number = 0
    while (path := out / f'library-{number:03d}').exists():
        number += 1
    return path
