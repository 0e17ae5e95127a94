# SPDX-License-Identifier: Apache-2.0
"""What an examination found."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

OK, WARN, FAIL = 'OK', 'WARN', 'FAIL'


@dataclass(frozen=True)
class Finding:
    """One line of the report. level: OK, WARN (slower or riskier than need be) or FAIL (must be put right)."""

    level: str
    name: str
    text: str
    fix: str = ''  # a command, or what to do


@dataclass(frozen=True)
class Host:
    """The machine examined: the folder that holds its /proc, /sys, /dev and /etc, and the environment of the process.

    ros: whether images come over ROS here, so that the network's buffers matter.
    """

    root: Path = Path('/')
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    ros: bool = True

    def read(self, path: str) -> str | None:
        """A small file below the root, stripped; None when it is not there or not ours to read."""
        try:
            return (self.root / path).read_text(errors='replace').strip('\0 \n')
        except OSError:
            return None

    def number(self, path: str) -> int | None:
        """A file that holds one integer."""
        text = self.read(path)
        try:
            return int(text) if text else None
        except ValueError:
            return None
