# SPDX-License-Identifier: Apache-2.0
"""Recorded calls with the references a policy would have had for them, and how far reuse moves their actions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from rmuscle_core.engine.plan import CallPlan, plan_call
from rmuscle_core.ffn import DenseFFN
from rmuscle_core.library import Reference
from rmuscle_core.library.recording import open_recording
from rmuscle_core.model.prefix import FFN
from rmuscle_core.policy import MusclePolicy, task_of
from rmuscle_core.settings import Settings

SLOTS = 3  # of the arena: the best call of two other executions, and the call before


@dataclass(frozen=True)
class Call:
    """One call to be tested: its prefix embeddings, dense actions, and references, the best one first."""

    prefix: torch.Tensor
    dense: torch.Tensor
    references: Sequence[Reference]


class Bench:
    """A policy and a recording: the first two thirds of the executions are the library, the rest is tested."""

    def __init__(self, checkpoint: Path, recording: Path) -> None:
        self.policy = MusclePolicy.load(checkpoint, Settings(slots=SLOTS, token_references=SLOTS))
        self.engine, self.model, self.config = self.policy.engine, self.policy.model, self.policy.config
        with open_recording(recording) as executions:
            episodes = list(executions)
        count = 2 * len(episodes) // 3
        self.library = [r for episode in episodes[:count] for r in self._references(episode)]
        self._tested = episodes[count:]

    def _references(self, episode) -> list[Reference]:
        task = task_of(episode.observations[0].prompt)
        return self.policy.record_references(episode.observations, task, episode.name)

    def nearest(self, reference: Reference, count: int) -> list[Reference]:
        """The most similar call of each of ``count`` other executions of the library, the best first."""
        compare = self.policy.memory.retriever.compare
        ordered = sorted((other for other in self.library if other.id.episode != reference.id.episode),
                         key=lambda other: -compare(reference.key, reference.states, other).similarity)
        best = {other.id.episode: other for other in reversed(ordered)}
        return sorted(best.values(), key=ordered.index)[:count]

    @torch.inference_mode()
    def calls(self) -> Iterator[Call]:
        """Those of the executions that are not in the library, but for the first of each, which has none before it."""
        for episode in self._tested:
            references = self._references(episode)
            for i, observation in enumerate(episode.observations[1:], 1):
                embedded = self.engine.embed(self.policy.processor.encode(observation))
                dense = self.act(embedded.prefix, DenseFFN(), DenseFFN())
                yield Call(embedded.prefix, dense, [*self.nearest(references[i], SLOTS - 1), references[i - 1]])

    def act(self, prefix: torch.Tensor, context: FFN, neurons: FFN) -> torch.Tensor:
        """Normalised actions [H, A_pad]."""
        return self.model.denoise(self.model.prefill(prefix, context), self.engine.noise, neurons)[0]

    def error(self, call: Call, context: FFN, neurons: FFN) -> float:
        """Mean |actions - dense| of the executed steps and the robot's joints, normalised."""
        moved = self.act(call.prefix, context, neurons) - call.dense
        return float(moved[:self.policy.execute_steps, :self.config.action_dim].abs().mean())

    def plan(self, **values) -> CallPlan:
        settings = Settings().with_values(**values)
        return plan_call(settings, self.config, self.engine.arena.shape.tokens, 0)

    def expand(self, reference: Reference, slot: int, plan: CallPlan, ranking: torch.Tensor | None = None) -> None:
        """ranking: instead of the reference's own."""
        own = torch.from_numpy(reference.neurons.astype(np.int32))
        self.engine.expand(reference, slot, own if ranking is None else ranking, plan, lambda: None)


class Tally:
    """Errors and evaluated shares of each variant."""

    def __init__(self) -> None:
        self._found: dict[str, list[tuple[float, float]]] = {}

    def add(self, variant: str, error: float, share: float) -> None:
        self._found.setdefault(variant, []).append((error, share))

    def rows(self) -> list[list[str | float]]:
        """[variant, evaluated, mean error, 95th percentile] in the order in which variants came up."""
        table = []
        for variant, found in self._found.items():
            errors, shares = np.array(found).T
            table.append([variant, round(float(shares.mean()), 3), round(float(errors.mean()), 4),
                          round(float(np.percentile(errors, 95)), 4)])
        return table


