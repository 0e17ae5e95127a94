# SPDX-License-Identifier: Apache-2.0
"""From an embedded observation to actions: by the reference that the memory offers, dense when that does not hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from rmuscle_core.engine.eager import EagerEngine, Embedded
from rmuscle_core.engine.faults import first_line, out_of_memory
from rmuscle_core.engine.graphs import GraphEngine
from rmuscle_core.engine.plan import CallPlan, plan_call
from rmuscle_core.errors import RMuscleError
from rmuscle_core.library import ReferenceId
from rmuscle_core.memory import MuscleMemory, Recall
from rmuscle_core.observation import CallReport
from rmuscle_core.retrieval import Match
from rmuscle_core.settings import Settings
from rmuscle_core.working_set import Reading

Computed = TypeVar('Computed')


class Actor:
    """Computes a call's actions and survives what references and short memory do to it. For the inference thread."""

    def __init__(self, engine: EagerEngine | GraphEngine, memory: MuscleMemory) -> None:
        self.engine, self.memory, self.config = engine, memory, engine.model.config

    def act(self, embedded: Embedded, recall: Recall, settings: Settings) -> tuple[torch.Tensor, CallReport]:
        """Actions float32 [H, A_pad] on the path the memory offers, else dense, and what was done."""
        report = CallReport(settings.mode, recall.path, recall.reason, tokens=embedded.tokens,
                            neurons=self.config.expert.mlp)
        actions, plan = None, CallPlan()
        if recall.match:
            actions, plan = self._act_cached(embedded, recall, settings, report)
        poisoned = actions is not None and not torch.isfinite(actions).all()
        if actions is None or poisoned:
            report.path, plan = 'dense', CallPlan()
            actions, report.milliseconds = self.afford(lambda: self.engine.act(embedded, plan, None))
        if poisoned and torch.isfinite(actions).all():  # else it is not the reference's fault
            for broken in self._broken(recall):
                self.memory.quarantine(broken, 'a call that used it gave a non-finite action')
            report.reason += ' and is out of use'
        if report.path != 'dense':
            report.reference, report.similarity = str(recall.match.id), recall.match.similarity
        report.tokens_recomputed = embedded.tokens if plan.tokens is None else plan.tokens
        report.neurons_evaluated = plan.mean_neurons(report.neurons, self.config.steps, settings.group_size)
        return actions, report

    def _broken(self, recall: Recall) -> list[ReferenceId]:
        """Which of a call's references hold a number that is none; the matched one if all look sound."""
        broken = []
        for reference in (recall.match.id, *recall.donors):
            with self.memory.working_set.reading(reference) as reading:
                if reading and not self.engine.arena.sound(reading.slot):
                    broken.append(reference)
        return broken or [recall.match.id]

    def afford(self, work: Callable[[], Computed]) -> Computed:
        """Do dense work; when memory runs out, once more with half the working set.

        Raises RMuscleError when that is not enough; the next call then gives up half of what is left.
        """
        try:
            return work()
        except Exception as error:
            if not out_of_memory(error):
                raise
        self.memory.shrink()  # out of the handler, whose exception holds on to what was allocated
        try:
            return work()
        except Exception as error:
            if not out_of_memory(error):
                raise
            raise RMuscleError(f'{self.engine.device} has no memory for a dense call ({first_line(error)}), though '
                               f'only {len(self.memory.working_set)} reference slots are left; free memory') from error

    def _act_cached(self, embedded: Embedded, recall: Recall, settings: Settings,
                    report: CallReport) -> tuple[torch.Tensor | None, CallPlan]:
        """Actions by the reference and the plan that made them; None, with why in the report, if it cannot serve."""
        match = recall.match
        plan, actions = plan_call(settings, self.config, embedded.tokens, embedded.text), None
        try:
            with self.memory.working_set.reading(match.id, recall.donors) as reading:
                if reading is None:
                    report.reason = f'{match.id} was replaced while it was matched'
                    return None, plan
                refusal = plan.neurons is not None and _no_action_cache(plan, match, reading, settings)
                if refusal:
                    plan = CallPlan(tokens=plan.tokens)
                    report.reason += f'; denoising ran dense, {refusal}'
                actions, report.milliseconds = self.engine.act(embedded, plan, reading.slot, reading.donors)
        except Exception as error:
            if not out_of_memory(error):
                raise
        if actions is None:
            self.memory.shrink()
            report.reason = f'memory ran out in a call with {match.id}, so half of the working set was given up'
        elif not torch.isfinite(actions).all():
            report.reason = f'{match.id} led to a non-finite action'
        return actions, plan


def _no_action_cache(plan: CallPlan, match: Match, reading: Reading, settings: Settings) -> str:
    """Why the Action Cache may not use this reference; empty if it may."""
    if match.similarity < settings.action_similarity:
        return f'since similarity {match.similarity:.2f} is below action_similarity {settings.action_similarity:g}'
    if reading.residual_neurons is None:
        return 'until its neurons are ranked'
    if plan.stored_residual and reading.residual_neurons != plan.neurons:
        return 'until its residual is rebuilt for the new neuron_ratio'
    return ''
