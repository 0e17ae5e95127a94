# SPDX-License-Identifier: Apache-2.0
"""What goes into a policy call and what comes out of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Observation:
    """One instant of the robot, in the checkpoint's own units and order.

    images: camera name (as in the checkpoint, without ``observation.images.``) -> uint8 [h, w, 3] RGB; an absent
        camera is a masked view.
    state: float32 [S], raw (not normalised).
    stamp_s: time of the observation in seconds, on the caller's clock.
    """

    images: Mapping[str, np.ndarray]
    state: np.ndarray
    prompt: str
    stamp_s: float = 0.0


@dataclass(frozen=True)
class Leftover:
    """What the robot still executes of the running chunk while the next is computed (real-time chunking).

    actions: float32 [n, A], absolute, in the checkpoint's units; row i is due when row i of the new chunk is.
    executed: how many of them will have been executed before the new chunk takes over.
    """

    actions: np.ndarray
    executed: int


@dataclass
class CallReport:
    """What one policy call did and why; every field is plain data, fit for JSON and for a message."""

    mode: str = 'dense'  # what was asked for: dense, context, action, full
    path: str = 'dense'  # what served it: library, previous_call, dense
    reason: str = ''  # why this path
    reference: str = ''  # "task/episode#call", empty on the dense path
    similarity: float = float('nan')
    tokens: int = 0  # visual tokens of this call
    tokens_recomputed: int = 0  # per prefix layer
    neurons: int = 0  # expert FFN neurons per layer
    neurons_evaluated: int = 0
    guided: bool = False  # computed to continue the running chunk (real-time chunking)
    milliseconds: dict[str, float] = field(default_factory=dict)  # stage -> ms; 'total' among them


@dataclass(frozen=True)
class ActionChunk:
    """actions: float32 [H, A], absolute, in the checkpoint's units; row i is due at stamp_s + (i + 1) * dt."""

    actions: np.ndarray
    report: CallReport
    stamp_s: float = 0.0
