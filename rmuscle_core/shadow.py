# SPDX-License-Identifier: Apache-2.0
"""The shadow check: does a cached call still say what a dense one would? Asked on the robot, in time nobody needs.

A library ages: the lamp, the table cloth, the object are not those it was recorded with. Retrieval sees some of that;
what it does to the actions is only known by computing them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from rmuscle_core.engine.eager import EagerEngine, Embedded
from rmuscle_core.engine.faults import device_failed, first_line
from rmuscle_core.engine.graphs import GraphEngine
from rmuscle_core.ffn import Interrupted
from rmuscle_core.settings import PROFILES, Settings

log = logging.getLogger(__name__)

WINDOW = 10  # checks that the running mean covers and that a judgement takes


@dataclass(frozen=True)
class _Sample:
    """A cached call to be repeated: its inputs and what it gave, float32 [H, A_pad]; ``rows`` of it are executed."""

    embedded: Embedded
    actions: torch.Tensor
    rows: int
    era: int


class ShadowCheck:
    """Repeats every ``shadow_every``-th cached call dense from the same inputs and noise, and compares.

    When the mean difference of WINDOW checks, the largest left out, exceeds ``shadow_limit``, calls step back: to the
    next more careful profile, in the end to dense. One call close to a decision between two motions differs by any
    amount and says little. A new episode goes one step forward again; but a step back that has to be made for the
    second time stays, until a setting is changed. So the number of steps is bounded, and nothing swings.

    Belongs to the inference thread, but for what ``offer`` returns, which is for the reconstruct thread. checks: made
    so far. problem: one sentence while calls are more careful than asked.
    """

    def __init__(self, engine: EagerEngine | GraphEngine) -> None:
        self.engine = engine
        self.checks = 0
        self.problem = ''
        self._asked: Settings | None = None
        self._tempered: Settings | None = None
        self._steps = self._kept = self._deepest = 0  # back from what is asked: now, at least, ever
        self._era = 0  # differences measured before the last change say nothing about now
        self._served = 0
        self._pending: _Sample | None = None
        self._measured: tuple[tuple[int, float], ...] = ()  # (era, difference), newest last; the other thread's

    @property
    def difference(self) -> float:
        """Mean |cached - dense| of the executed actions, normalised units, over the last checks; NaN without any."""
        recent = self._recent()
        return sum(recent) / len(recent) if recent else math.nan

    def temper(self, settings: Settings) -> Settings:
        """The settings that a call may use in place of those asked for."""
        if settings != self._asked:
            self._asked, self._kept, self._deepest = settings, 0, 0
            self._take(0)
        elif self._judgement() > settings.shadow_limit:
            self._step_back(settings)
        return self._tempered

    def begin_episode(self) -> None:
        """Another scene may be better: one step forward again, unless that has failed before."""
        if self._steps > self._kept:
            self._take(self._steps - 1)

    def offer(self, embedded: Embedded, actions: torch.Tensor, path: str,
              rows: int) -> Callable[[Callable[[], None]], None] | None:
        """Take note of a call that is out; returns ``work(checkpoint)`` where something is left to be repeated."""
        every = self._tempered.shadow_every if self._tempered else 0
        if not every:
            self._pending = None
        elif path != 'dense':
            if self._served % every == 0:  # a copy, since an engine may use the memory again
                kept = replace(embedded, prefix=embedded.prefix.clone())
                self._pending = _Sample(kept, actions, rows, self._era)
            self._served += 1
        return self._repeat if self._pending else None

    def _repeat(self, checkpoint: Callable[[], None]) -> None:
        sample = self._pending
        if sample is None:
            return
        try:
            dense = self.engine.dense(sample.embedded, checkpoint)
        except Interrupted:
            raise  # to be repeated in the next interval
        except Exception as error:
            if device_failed(error):
                raise
            self._pending = None  # references need the time and the memory more
            log.warning(f'a shadow check was given up ({first_line(error)})')
            return
        actions = self.engine.model.config.action_dim
        difference = float((dense - sample.actions)[:sample.rows, :actions].abs().mean())
        self._pending = None
        self.checks += 1
        if math.isfinite(difference):
            self._measured = (*self._measured, (sample.era, difference))[-WINDOW:]

    def _recent(self) -> list[float]:
        return [difference for era, difference in self._measured if era == self._era]

    def _judgement(self) -> float:
        recent = sorted(self._recent())[:-1]
        return sum(recent) / len(recent) if len(recent) == WINDOW - 1 else 0.0

    def _step_back(self, asked: Settings) -> None:
        if self._tempered.mode == 'dense':
            return
        found, steps = self._judgement(), self._steps + 1
        if steps <= self._deepest:
            self._kept = steps
        self._deepest = max(self._deepest, steps)
        self._take(steps)
        held = 'until a setting is changed' if self._kept == steps else 'a new episode goes one step forward again'
        now = 'dense' if self._tempered.mode == 'dense' else f'with the profile {self._tempered.profile}'
        self.problem = (f'cached actions were off by {found:.3g} on average over {WINDOW} shadow checks, more than '
                        f'shadow_limit {asked.shadow_limit:g}, so calls run {now} ({held}); record the task as it '
                        'looks today, or raise shadow_limit')
        log.warning(self.problem)

    def _take(self, steps: int) -> None:
        self._steps, self._tempered, self._era = steps, self._asked, self._era + 1
        for _ in range(steps):
            self._tempered = more_careful(self._tempered)
        if not steps:
            self.problem = ''


def more_careful(settings: Settings) -> Settings:
    """One step back: the named profile that comes next in both ratios; dense where none does."""
    now = settings.token_ratio, settings.neuron_ratio
    above = [name for name, pair in PROFILES.items() if pair != now and pair[0] >= now[0] and pair[1] >= now[1]]
    if not above:
        return settings.with_values(mode='dense')
    return settings.with_values(profile=min(above, key=PROFILES.get))
