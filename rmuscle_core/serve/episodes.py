# SPDX-License-Identifier: Apache-2.0
"""Which connection's episode the one policy is in."""

from __future__ import annotations

from typing import Any

import numpy as np

from rmuscle_core.errors import ObservationError
from rmuscle_core.observation import ActionChunk, Observation
from rmuscle_core.policy import MusclePolicy


class EpisodeCalls:
    """Calls of several clients on one policy, which has one running episode: that of the client who called last.

    A call by another client or marked as a beginning starts a new episode, and so, in the policy, does one for another
    task. So one robot at a time
    has the whole muscle memory; robots that take turns are answered as correctly, by the references that an episode's
    first call may use or dense. Every method belongs to the inference thread. prompt: what the policy was warmed up
    with.
    """

    def __init__(self, policy: MusclePolicy, prompt: str) -> None:
        self._policy = policy
        self._caller: Any = None
        self._prompt, self._fresh = prompt, True  # reset for this prompt, and no call since

    def infer(self, caller: Any, observation: Observation, begins: bool = False) -> ActionChunk:
        """Answer one call; ObservationError when the observation does not fit or the answer is not finite."""
        if not self._fresh and (begins or caller != self._caller):
            self._policy.reset_episode(observation.prompt)
        self._caller, self._prompt, self._fresh = caller, observation.prompt, False
        chunk = self._policy.infer(observation)
        if not np.isfinite(chunk.actions).all():
            raise ObservationError('the policy answered this observation with actions that are not finite, which no '
                                   'robot may execute; check the state and the checkpoint')
        return chunk

    def published(self, caller: Any, next_call_in_s: float) -> None:
        """The caller executes its chunk from now on, unless another one's call came in between."""
        if caller == self._caller:
            self._policy.chunk_published(next_call_in_s)

    def leave(self, caller: Any) -> None:
        """The caller is gone; if the episode was its own, prepare for the first call of the next one."""
        if caller == self._caller:
            self._policy.reset_episode(self._prompt)
            self._caller, self._fresh = None, True
