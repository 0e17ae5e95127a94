# SPDX-License-Identifier: Apache-2.0
"""From episodes to a library: what is there already is passed over, what cannot be used is skipped with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from rmuscle_core.errors import EpisodeError, ObservationError
from rmuscle_core.importing.episodes import PendingEpisode
from rmuscle_core.policy import MusclePolicy, task_of


@dataclass
class BuildReport:
    """Counts of episodes; skipped: (episode, why)."""

    added: int = 0
    present: int = 0
    skipped: list[tuple[str, str]] = field(default_factory=list)


def build_library(policy: MusclePolicy, episodes: Iterable[PendingEpisode],
                  done: Callable[[PendingEpisode], None] = lambda episode: None) -> BuildReport:
    """Add every episode to the policy's library that it does not have; each is on disk before the next is read.

    So a build that was interrupted goes on where it was. Raises LibraryError when the library cannot be written.
    """
    report = BuildReport()
    for pending in episodes:
        try:
            _add(policy, pending, report)
        except (EpisodeError, ObservationError) as error:
            report.skipped.append((pending.name, str(error)))
        done(pending)
    return report


def _add(policy: MusclePolicy, pending: PendingEpisode, report: BuildReport) -> None:
    known = {(stored.task, stored.episode) for stored in policy.library.episodes}
    if (task_of(pending.prompt), pending.name) in known:
        report.present += 1
        return
    episode = pending.read()
    if not episode.observations:
        raise EpisodeError(f'episode {pending.name} has no observations; remove it or record it again')
    task = task_of(episode.observations[0].prompt)
    if (task, pending.name) in known:
        report.present += 1
        return
    references = policy.record_references(episode.observations, task, pending.name)
    policy.library.add_episode(task, references, episode.success, pending.name)
    report.added += 1
