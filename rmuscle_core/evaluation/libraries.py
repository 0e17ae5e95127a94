# SPDX-License-Identifier: Apache-2.0
"""The libraries that rows are served from, made from dense executions at seeds that no row is tested on."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from rmuscle_core.errors import RMuscleError
from rmuscle_core.evaluation.rows import Row
from rmuscle_core.ffn import DenseFFN
from rmuscle_core.library import Reference
from rmuscle_core.library.recording import RecordedEpisode, open_recording, write_recording
from rmuscle_core.policy import MusclePolicy, task_of
from rmuscle_core.settings import Settings
from rmuscle_core.workcell.evaluate import run_episodes
from rmuscle_core.workcell.tasks import Cell


def record(checkpoint: Path, cell: Cell, path: Path, count: int, first_seed: int) -> None:
    """Write ``count`` successful dense executions, from seeds first_seed on; keeps a recording that is large enough.

    Raises RMuscleError when the policy hardly ever succeeds.
    """
    if path.exists():
        with open_recording(path) as recording:
            if len(recording) >= count:
                return
    policy = MusclePolicy.load(checkpoint, Settings(mode='dense'))
    episodes: list[RecordedEpisode] = []
    for seed in range(first_seed, first_seed + 10 * count):
        episode, = run_episodes(cell, policy, [seed], policy.config.execute_steps)
        if episode.success:
            episodes.append(RecordedEpisode(f'seed-{seed}', True, episode.observations))
        if len(episodes) == count:
            break
    policy.close()
    if len(episodes) < count:
        raise RMuscleError(f'only {len(episodes)} of {10 * count} dense executions of {checkpoint} succeeded, '
                           f'{count} are needed for a library; train the policy longer')
    write_recording(path, episodes, cell.joints)


def library_name(row: Row) -> str:
    """Rows with equal names are served from the same library."""
    settings = Settings().with_values(**row.settings)
    steps = f'-steps{settings.denoise_steps}' if settings.denoise_steps else ''
    return f'{row.episodes}-group{settings.group_size}-mask{settings.mask_ratio:g}-{row.rank}{steps}'


def build(row: Row, checkpoint: Path, recording: Path, directory: Path) -> Path:
    """Make the row's library if it is not there yet; return where it is."""
    path = directory / library_name(row)
    if path.exists():
        return path
    temporary = path.with_name(f'{path.name}.part-{os.getpid()}')
    settings = Settings().with_values(**{**row.settings, 'mode': 'full'})
    policy = MusclePolicy.load(checkpoint, settings, temporary, need_library=True)
    recorded = []
    with open_recording(recording) as executions:
        for execution in list(executions)[:row.episodes]:
            task = task_of(execution.observations[0].prompt)
            recorded.append(policy.record_references(execution.observations, task, execution.name))
    if row.rank == 'change':
        recorded = rank_by_change(policy, recorded)
    for references in recorded:
        policy.library.add_episode(references[0].id.task, references, True, references[0].id.episode)
    policy.close()
    os.replace(temporary, path)
    return path


class _ActivationFFN:
    """Dense expert FFN that keeps what every neuron contributes: float32 [K, M, H, N]."""

    def __init__(self) -> None:
        self.steps: dict[tuple[int, int], torch.Tensor] = {}

    def __call__(self, x: torch.Tensor, mlp, layer: int, step: int = 0) -> torch.Tensor:
        a = mlp.activations(x)
        self.steps[step, layer] = a[0].float() * mlp.down.weight.float().norm(dim=0)
        return mlp.down(a)


@torch.inference_mode()
def rank_by_change(policy: MusclePolicy, episodes: Sequence[Sequence[Reference]]) -> list[list[Reference]]:
    """The references with neurons ranked by how much their contribution changes to the nearest other episode's call.

    What hardly changes between executions is well served by the reference's own contribution.
    """
    flat = [reference for episode in episodes for reference in episode]
    contributions = [_contributions(policy, reference) for reference in flat]
    states = np.stack([reference.states[-1] for reference in flat])
    group, masked = policy.settings.group_size, policy.engine.arena.shape.masked
    ranked: dict[object, np.ndarray] = {}
    for number, reference in enumerate(flat):
        distance = np.linalg.norm(states - states[number], axis=1)
        distance[[other.id.episode == reference.id.episode for other in flat]] = np.inf
        nearest = contributions[int(distance.argmin())]
        change = (contributions[number] - nearest).abs().sum(2)  # [K, M, N]
        groups = math.ceil(change.shape[0] / group)
        scores = torch.stack([change[g * group:(g + 1) * group].sum(0) for g in range(groups)])
        order = scores.argsort(dim=-1, descending=True, stable=True)[..., :masked]
        ranked[reference.id] = order.numpy().astype(np.uint16)
    return [[replace(reference, neurons=ranked[reference.id]) for reference in episode] for episode in episodes]


def _contributions(policy: MusclePolicy, reference: Reference) -> torch.Tensor:
    keep, config = _ActivationFFN(), policy.config
    policy.engine.rerun(reference, DenseFFN(), keep)
    return torch.stack([torch.stack([keep.steps[step, layer] for layer in range(config.expert.layers)])
                        for step in range(config.steps)])
