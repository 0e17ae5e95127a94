# SPDX-License-Identifier: Apache-2.0
"""The text a policy reads: the task, and in pi0.5 also the robot state as 257 bins."""

from __future__ import annotations

import numpy as np

from rmuscle_core.errors import ObservationError
from rmuscle_core.processing.tokenizer import Tokenizer

_EDGES = np.linspace(-1, 1, 257)[:-1]


def state_bins(state: np.ndarray) -> np.ndarray:
    """Normalised state [S] to bins [S] in -1..255; -1 is anything below -1, 255 anything above the last edge."""
    return np.digitize(state, _EDGES) - 1


def prompt_parts(kind: str, task: str, state: np.ndarray) -> tuple[str, str]:
    """Return (task text, the part after it that must never be cut) for kind 'pi05' or 'pi0'."""
    if kind == 'pi05':
        cleaned = task.strip().replace('_', ' ').replace('\n', ' ')
        return f'Task: {cleaned}', f', State: {" ".join(map(str, state_bins(state)))};\nAction: '
    return task.removesuffix('\n'), '\n'


def prompt_ids(kind: str, task: str, state: np.ndarray, tokenizer: Tokenizer, limit: int) -> tuple[list[int], int]:
    """Token ids of the prompt, <bos> first, at most ``limit``, and how many it has uncut; ``state`` normalised [S].

    A prompt that is too long loses the end of its task text, never the state or "Action: ": a plain cut at the limit
    would leave the policy blind to its state. Raises ObservationError when the state alone does not fit.
    """
    head, tail = prompt_parts(kind, task, state)
    ids = tokenizer.encode(head + tail)
    if len(ids) <= limit:
        return ids, len(ids)
    tail_ids = tokenizer.encode(tail)[1:]
    room = limit - len(tail_ids)
    if room < 1:
        raise ObservationError(f'the state part of the prompt has {len(tail_ids)} tokens and the start token one, more '
                               f'than the {limit} the checkpoint allows; use a checkpoint with a longer prompt')
    return tokenizer.encode(head)[:room] + tail_ids, len(ids)
