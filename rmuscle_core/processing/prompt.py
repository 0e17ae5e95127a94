# SPDX-License-Identifier: Apache-2.0
"""The text a policy reads: the task, and in pi0.5 also the robot state as 257 bins."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rmuscle_core.errors import ObservationError
from rmuscle_core.processing.tokenizer import Tokenizer

_EDGES = np.linspace(-1, 1, 257)[:-1]


def state_bins(state: np.ndarray) -> np.ndarray:
    """Normalised state [S] to bins [S] in -1..255; -1 is anything below -1, 255 anything above the last edge."""
    return np.digitize(state, _EDGES) - 1


@dataclass(frozen=True)
class PromptRule:
    """How a checkpoint's prompt is made: a style of `prompt_parts`, the most tokens it may have.

    padded_dim: zeros are put behind the state up to so many bins, as LeRobot before 0.5 did; 0 for none.
    """

    style: str
    limit: int
    padded_dim: int = 0

    def ids(self, task: str, state: np.ndarray, tokenizer: Tokenizer) -> tuple[list[int], int]:
        """Token ids for a normalised state [S], and how many there were before the prompt was cut."""
        padded = np.zeros(max(self.padded_dim, len(state)), np.float32)
        padded[:len(state)] = state
        return prompt_ids(self.style, task, padded, tokenizer, self.limit)

    def report(self, state_dim: int) -> dict[str, str]:
        state = f'state of {self.padded_dim or state_dim} bins' if self.style == 'pi05' else 'no state'
        return {'prompt': f'{self.style}, {state}, at most {self.limit} tokens'}


def prompt_parts(style: str, task: str, state: np.ndarray) -> tuple[str, str]:
    """Return (task text, the part after it that must never be cut).

    Styles: 'pi05' with the state; 'pi0' as LeRobot writes it; 'openpi', for its pi0 and for a pi0.5 without the state.
    """
    cleaned = task.strip().replace('_', ' ').replace('\n', ' ')
    if style == 'pi05':
        return f'Task: {cleaned}', f', State: {" ".join(map(str, state_bins(state)))};\nAction: '
    return (cleaned if style == 'openpi' else task.removesuffix('\n')), '\n'


def prompt_ids(style: str, task: str, state: np.ndarray, tokenizer: Tokenizer, limit: int) -> tuple[list[int], int]:
    """Token ids of the prompt, <bos> first, at most ``limit``, and how many it has uncut; ``state`` normalised [S].

    A prompt that is too long loses the end of its task text, never the state or "Action: ": a plain cut at the limit
    would leave the policy blind to its state. Raises ObservationError when the state alone does not fit.
    """
    head, tail = prompt_parts(style, task, state)
    tail_ids = tokenizer.encode(tail)[1:]
    # openpi tokenizes the newline by itself, so that it never merges with what comes before.
    ids = tokenizer.encode(head) + tail_ids if style == 'openpi' else tokenizer.encode(head + tail)
    if len(ids) <= limit:
        return ids, len(ids)
    room = limit - len(tail_ids)
    if room < 1:
        raise ObservationError(f'the state part of the prompt has {len(tail_ids)} tokens and the start token one, more '
                               f'than the {limit} the checkpoint allows; use a checkpoint with a longer prompt')
    return tokenizer.encode(head)[:room] + tail_ids, len(ids)
