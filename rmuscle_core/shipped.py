# SPDX-License-Identifier: Apache-2.0
"""Files that come with the project: in a source tree, or below the prefix of a ROS or pip installation."""

from __future__ import annotations

from pathlib import Path

_PLACES = [parent / folder for parent in Path(__file__).resolve().parents
           for folder in ('config', 'share/rmuscle/config')]


def shipped(name: str) -> Path | None:
    """Where config/``name`` is; None if it is not installed."""
    return next((place / name for place in _PLACES if (place / name).exists()), None)
