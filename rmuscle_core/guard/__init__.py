# SPDX-License-Identifier: Apache-2.0
"""Last check before motion: a chunk of actions becomes a trajectory a robot may execute, or is refused."""

from rmuscle_core.guard.plan import Limits, Planned, plan_trajectory
from rmuscle_core.guard.realtime import ConsumedSteps, leftover_of
from rmuscle_core.guard.trajectory import ChunkRefused, Trajectory, check_trajectory, hold, step_times

__all__ = ['ChunkRefused', 'ConsumedSteps', 'Limits', 'Planned', 'Trajectory', 'check_trajectory', 'hold',
           'leftover_of', 'plan_trajectory', 'step_times']
