# SPDX-License-Identifier: Apache-2.0
"""Closed loop in the simulated cell without ROS: success of a policy over seeds, dense or with its caches."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rmuscle_core.errors import ObservationError
from rmuscle_core.evaluation.statistics import wilson_interval
from rmuscle_core.observation import CallReport, Observation
from rmuscle_core.policy import MusclePolicy
from rmuscle_core.workcell.tasks import Cell

PATIENCE_S = 60.0  # for expansions, which end with their interval


@dataclass(frozen=True)
class Episode:
    """What happened from one seed: an observation and a report for every policy call."""

    seed: int
    success: bool
    steps: int
    observations: Sequence[Observation]
    reports: Sequence[CallReport]


def check_fits(policy: MusclePolicy, cell: Cell) -> None:
    """Raise ObservationError when the checkpoint is not one for this cell."""
    config, joints = policy.config, len(cell.joints)
    if not set(config.cameras) <= set(cell.cameras) or config.action_dim != joints or config.state_dim != joints:
        raise ObservationError(f'the cell has cameras {", ".join(cell.cameras)} and {joints} joints, the checkpoint '
                               f'{", ".join(config.cameras)} and {config.state_dim} joints with {config.action_dim} '
                               'actions; train one with "rmuscle workcell train"')


def run_episode(cell: Cell, policy: MusclePolicy, seed: int, execute: int,
                frozen: dict[str, np.ndarray] | None = None) -> Episode:
    """One closed-loop episode: observe, infer, execute the chunk's first ``execute`` commands, until done.

    The policy has no more time to prepare references than the robot would give it, and often less.
    frozen: images to show instead of the cameras', a control for a policy that acts blindly.
    """
    cell.reset(seed)
    policy.reset_episode(cell.task)
    policy.wait_ready(PATIENCE_S)
    observations, reports = [], []
    step, success = 0, False
    while step < cell.episode_steps and not success:
        images = {camera: image for camera, image in (frozen or cell.images()).items()
                  if camera in policy.config.cameras}
        observations.append(Observation(images, cell.state(), cell.task, step / cell.control_rate))
        chunk = policy.infer(observations[-1])
        reports.append(chunk.report)
        policy.chunk_published(execute / cell.control_rate)
        for command in chunk.actions[:execute]:
            step += 1
            success = cell.step(command)
            if success or step == cell.episode_steps:
                break
        policy.wait_ready(PATIENCE_S)
    return Episode(seed, success, step, observations, reports)


def run_episodes(cell: Cell, policy: MusclePolicy, seeds: Sequence[int], execute: int, frozen: bool = False,
                 progress: Callable[[Episode], None] = lambda episode: None) -> list[Episode]:
    """Run every seed; ``frozen`` shows the first seed's first images all the time."""
    check_fits(policy, cell)
    if not 1 <= execute <= policy.config.chunk_size:
        raise ObservationError(f'a chunk has {policy.config.chunk_size} commands, {execute} of it cannot be executed; '
                               f'choose 1 to {policy.config.chunk_size}')
    policy.execute_steps = execute  # so that it looks ahead to where this many commands lead
    cell.reset(seeds[0])
    shown = cell.images() if frozen else None
    episodes = []
    for seed in seeds:
        episodes.append(run_episode(cell, policy, seed, execute, shown))
        progress(episodes[-1])
    return episodes


def summary(episodes: Sequence[Episode]) -> dict:
    """Plain numbers of a run, fit for JSON."""
    successes = sum(episode.success for episode in episodes)
    reports = [report for episode in episodes for report in episode.reports]
    similarities = [report.similarity for report in reports if not math.isnan(report.similarity)]
    return {
        'episodes': len(episodes), 'successes': successes, 'interval': wilson_interval(successes, len(episodes)),
        'calls_per_episode': len(reports) / len(episodes),
        'paths': dict(Counter(report.path for report in reports)),
        'similarity': float(np.mean(similarities)) if similarities else None,
        'milliseconds': float(np.mean([report.milliseconds['total'] for report in reports])),
        'failed_seeds': [episode.seed for episode in episodes if not episode.success],
    }
