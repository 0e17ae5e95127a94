# SPDX-License-Identifier: Apache-2.0
"""Real-time chunking, the policy's side: what the running chunk leaves over becomes what the next is held to."""

from __future__ import annotations

import numpy as np

from rmuscle_core.errors import ObservationError
from rmuscle_core.model import ModelConfig
from rmuscle_core.model.guidance import Guidance
from rmuscle_core.observation import Leftover, Observation
from rmuscle_core.processing import Processor
from rmuscle_core.settings import Settings


def guidance_of(leftover: Leftover | None, observation: Observation, processor: Processor, config: ModelConfig,
                settings: Settings) -> Guidance | None:
    """What holds the chunk for ``observation`` to the running one; None when nothing does.

    Raises ObservationError for a leftover that is not finite, of another robot, or executed less than 0 steps.
    """
    if leftover is None or settings.rtc == 'off' or not len(leftover.actions):
        return None
    actions, width = np.asarray(leftover.actions, np.float32), config.action_dim
    if actions.ndim != 2 or actions.shape[1] != width or not np.isfinite(actions).all() or leftover.executed < 0:
        raise ObservationError(f'the leftover of the running chunk must hold finite numbers of shape [steps, {width}], '
                               f'0 or more of them executed; found shape {list(actions.shape)}, {leftover.executed} '
                               'executed; leave it out to begin anew')
    return Guidance.towards(processor.encode_actions(actions, observation), leftover.executed,
                            (config.chunk_size, config.padded_dim), horizon=settings.rtc_horizon,
                            schedule=settings.rtc, limit=settings.rtc_weight)
