# SPDX-License-Identifier: Apache-2.0
"""What every importer yields, and what it needs to know about the policy."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from rmuscle_core.errors import EpisodeError, SettingsError
from rmuscle_core.library.recording import RecordedEpisode


@dataclass(frozen=True)
class PendingEpisode:
    """An episode found but not read yet. ``read`` raises EpisodeError, or ObservationError for its content."""

    name: str
    prompt: str
    read: Callable[[], RecordedEpisode]


class EpisodeSource(Protocol):
    """Something with episodes; a context that closes its files.

    cameras: those of the checkpoint that it has. joints: names in the order of the state, () if it has none.
    execute_steps: actions between two policy calls.
    """

    cameras: tuple[str, ...]
    joints: tuple[str, ...]
    execute_steps: int

    def __enter__(self) -> EpisodeSource: ...
    def __exit__(self, *_: object) -> None: ...
    def __iter__(self) -> Iterator[PendingEpisode]: ...


@dataclass(frozen=True)
class Wanted:
    """What the policy expects of an episode.

    cameras: the checkpoint's. renamed: camera -> name in the source. masked: cameras the source does not have.
    execute_steps: actions between two policy calls; control_rate_hz: actions per second, None for the source's own.
    prompt: instead of the source's.
    """

    cameras: tuple[str, ...]
    state_dim: int
    execute_steps: int
    renamed: Mapping[str, str] = field(default_factory=dict)
    masked: Collection[str] = ()
    control_rate_hz: float | None = None
    prompt: str = ''

    def camera_map(self, found: Collection[str], source: str) -> dict[str, str]:
        """Checkpoint camera -> name in the source, by equal names unless renamed.

        Raises SettingsError naming the camera of the checkpoint that the source lacks, or the option that fits none.
        """
        unknown = sorted({*self.renamed, *self.masked} - set(self.cameras))
        if unknown:
            raise SettingsError(f'{unknown[0]!r} is not a camera of the checkpoint ({", ".join(self.cameras)})')
        chosen = {c: self.renamed.get(c, c) for c in self.cameras if c not in self.masked}
        missing = next((camera for camera, name in chosen.items() if name not in found), None)
        if missing:
            raise SettingsError(f'{source} has no camera {chosen[missing]!r} for the checkpoint\'s {missing} (its '
                                f'cameras: {", ".join(sorted(found)) or "none"}); name it with --camera {missing}=NAME'
                                f', or leave it out with --masked-camera {missing}, as the robot will')
        if not chosen:
            raise SettingsError(f'every camera of the checkpoint is masked; {source} needs at least one of them')
        return chosen


def file_name(text: str) -> str:
    """The text as the name of a library's episode: letters, digits, ".", "_" and "-", at most 100."""
    name = re.sub(r'[^A-Za-z0-9._-]+', '-', text).strip('-._')[-100:].lstrip('-._')
    if not name:
        raise EpisodeError(f'{text!r} gives no file name for its episodes; rename it with letters or digits')
    return name
