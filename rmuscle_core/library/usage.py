# SPDX-License-Identifier: Apache-2.0
"""Which episodes served when, kept on disk as the times of empty files, and which of them to give up first."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable

from rmuscle_core.library.folder import mark_of
from rmuscle_core.library.index import StoredEpisode
from rmuscle_core.library.reference import ReferenceId


class Usage:
    """``note`` is cheap enough for the inference thread; ``write`` belongs where files are read and written."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._noted: dict[tuple[str, str], float] = {}

    def note(self, reference: ReferenceId) -> None:
        self._noted[(reference.task, reference.episode)] = self._clock()

    def write(self, stored: Callable[[tuple[str, str]], StoredEpisode | None]) -> None:
        """Bring what was noted to disk; a place that cannot be written forgets it at the end of the process."""
        noted, self._noted = self._noted, {}
        for key, seconds in list(noted.items()):  # ``note`` may have the old table in its hands
            episode = stored(key)
            if episode:
                with contextlib.suppress(OSError):
                    mark_of(episode.path).touch()
                    os.utime(mark_of(episode.path), (seconds, seconds))


def last_used_ns(episode: StoredEpisode) -> int:
    """When the episode last served a call, or was recorded if it never did; nanoseconds since 1970."""
    try:
        return max(episode.changed_ns, mark_of(episode.path).stat().st_mtime_ns)
    except OSError:
        return episode.changed_ns


def eviction_order(episodes: Iterable[StoredEpisode]) -> list[StoredEpisode]:
    """Failed episodes, then by last use; of two used at the same time the older recording goes first."""
    return sorted(episodes, key=lambda e: (e.success, last_used_ns(e), e.changed_ns, e.task, e.episode))
