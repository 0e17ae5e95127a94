# SPDX-License-Identifier: Apache-2.0
"""Engines that are compared in closed loop: ours with expansions remembered, other ways to save work, and controls.

The other ways are our own re-implementations from what their papers describe: step skipping (DP-Cache), starting from
a retrieved chunk (NIRVANA), replaying it (RT-Cache). They change what ``act`` computes and nothing else, so that
retrieval, noise, processing and timing are the same for all rows of a table.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from rmuscle_core.engine.eager import EagerEngine, Embedded
from rmuscle_core.engine.plan import CallPlan
from rmuscle_core.ffn import ContextFFN, DenseFFN
from rmuscle_core.library import Reference, ReferenceId
from rmuscle_core.model import VLA
from rmuscle_core.model.prefix import PrefixCache
from rmuscle_core.settings import Settings


class MemoEngine(EagerEngine):
    """The plain engine; a library reference is computed at its first expansion and copied at every later one.

    Expansion is deterministic, so a call sees what it would see without this; an evaluation takes a fifth of the time.
    """

    def __init__(self, model: VLA, settings: Settings, views: int) -> None:
        super().__init__(model, settings, views)
        self._memo: dict[tuple[ReferenceId, CallPlan], list[torch.Tensor]] = {}

    def expand(self, reference: Reference, slot: int, neurons: torch.Tensor, plan: CallPlan,
               checkpoint: Callable[[], None]) -> None:
        parts = [part[slot] for part in self._slots()]
        key = reference.id, plan
        if key in self._memo:
            for part, kept in zip(parts, self._memo[key]):
                part.copy_(kept)
            return
        self._compute(reference, slot, neurons, plan, checkpoint)
        if not reference.id.episode.startswith('running-'):  # of this episode only, so it will not come again
            self._memo[key] = [part.clone() for part in parts]

    def _slots(self) -> list[torch.Tensor]:
        arena = self.arena
        return [part for part in (arena.x, arena.y, arena.neurons, arena.residual) if part is not None]

    def _compute(self, *arguments) -> None:
        super().expand(*arguments)


class RandomNeurons(MemoEngine):
    """Control: as many neurons as the mask has, drawn at random once per reference."""

    def _compute(self, reference: Reference, slot: int, neurons: torch.Tensor, plan: CallPlan,
                 checkpoint: Callable[[], None]) -> None:
        generator = torch.Generator().manual_seed(reference.id.call)
        scores = torch.rand(*neurons.shape[:2], self.model.config.expert.mlp, generator=generator)
        drawn = scores.argsort(-1)[..., :neurons.shape[-1]].to(torch.int32)
        super()._compute(reference, slot, drawn, plan, checkpoint)


class RandomTokens(MemoEngine):
    """Control: as many visual tokens as the plan says are recomputed, drawn at random per layer and call."""

    def __init__(self, model: VLA, settings: Settings, views: int) -> None:
        super().__init__(model, settings, views)
        self._generator = torch.Generator().manual_seed(0)

    def _call_ffns(self, plan: CallPlan, slot: int | None, donors: Sequence[int] = ()):
        context, neurons = super()._call_ffns(plan, slot, donors)
        if isinstance(context, ContextFFN):
            context = _RandomContextFFN(self.arena, plan.tokens, self._generator)
        return context, neurons


class _RandomContextFFN:
    def __init__(self, arena, tokens_recomputed: int, generator: torch.Generator) -> None:
        self.arena, self.k, self.generator = arena, tokens_recomputed, generator

    def __call__(self, x: torch.Tensor, mlp, layer: int, step: int = 0) -> torch.Tensor:
        rows, tokens = x[0], self.arena.shape.tokens
        drawn = torch.randperm(tokens, generator=self.generator)[:self.k]
        index = torch.cat([drawn, torch.arange(tokens, rows.shape[0])]).to(x.device)
        y = torch.empty_like(rows)
        y[:tokens] = self.arena.y[:, layer].index_select(0, self.arena.slot)[0]
        return y.index_copy_(0, index, mlp(rows.index_select(0, index)))[None]


class DenoiseEngine(MemoEngine):
    """Base of those that prefill densely and denoise in another way: ``_denoise`` -> normalised actions [1, H, A]."""

    @torch.inference_mode()
    def act(self, embedded: Embedded, plan: CallPlan, slot: int | None,
            donors: Sequence[int] = ()) -> tuple[torch.Tensor, dict[str, float]]:
        start = time.perf_counter()
        actions = self._denoise(embedded, slot)
        return actions[0].float(), {'denoise': 1e3 * (time.perf_counter() - start)}

    def _prefill(self, embedded: Embedded) -> PrefixCache:
        return self.model.prefill(embedded.prefix, DenseFFN())

    def _denoise(self, embedded: Embedded, slot: int | None) -> torch.Tensor:
        raise NotImplementedError

    def _euler(self, embedded: Embedded, x: torch.Tensor, times: list[float]) -> torch.Tensor:
        """Integrate from times[0] to 0 by one Euler step from each time to the next."""
        cache, state = self._prefill(embedded), self._state(embedded.inputs.state)
        for step, (t, after) in enumerate(zip(times, [*times[1:], 0.0])):
            moment = torch.tensor([t], device=self.device)
            x = x + self.model.velocity(cache, x, step, DenseFFN(), state, moment) * (after - t)
        return x


class SkipSteps(DenoiseEngine):
    """DP-Cache as described: the network runs at every second step, and a skipped step reuses the last velocity."""

    def _denoise(self, embedded: Embedded, slot: int | None) -> torch.Tensor:
        cache, state, x = self._prefill(embedded), self._state(embedded.inputs.state), self.noise
        steps = self.model.config.steps
        for step in range(steps):
            if step % 2 == 0:
                velocity = self.model.velocity(cache, x, step, DenseFFN(), state)
            x = x + velocity * (-1.0 / steps)
        return x


class ReferenceChunks(DenoiseEngine):
    """Base of those that use the reference's own actions: ``chunks`` float32 [slots, H, A_pad], normalised."""

    def __init__(self, model: VLA, settings: Settings, views: int) -> None:
        super().__init__(model, settings, views)
        self.chunks = torch.zeros(settings.slots, *self.noise.shape[1:], device=self.device)

    def _slots(self) -> list[torch.Tensor]:
        return [self.chunks]

    def _compute(self, reference: Reference, slot: int, neurons: torch.Tensor, plan: CallPlan,
                 checkpoint: Callable[[], None]) -> None:
        self.chunks[slot] = self.rerun(reference, DenseFFN(), DenseFFN())[0]

    def _dense(self, embedded: Embedded) -> torch.Tensor:
        state = self._state(embedded.inputs.state)
        return self.model.denoise(self._prefill(embedded), self.noise, DenseFFN(), state)


def warm_start(share: float) -> type[ReferenceChunks]:
    """NIRVANA as described: the retrieved chunk, noised to where ``share`` of the steps is left, is denoised on."""
    class WarmStart(ReferenceChunks):
        def _denoise(self, embedded: Embedded, slot: int | None) -> torch.Tensor:
            if slot is None:
                return self._dense(embedded)
            steps = self.model.config.steps
            left = round(share * steps)
            x = share * self.noise + (1 - share) * self.chunks[slot]
            return self._euler(embedded, x, [k / steps for k in range(left, 0, -1)])

    return WarmStart


class Replay(ReferenceChunks):
    """RT-Cache as described: the retrieved chunk is executed as it is."""

    def _denoise(self, embedded: Embedded, slot: int | None) -> torch.Tensor:
        return self._dense(embedded) if slot is None else self.chunks[slot][None]


class DenseFirstStep(MemoEngine):
    """Beyond the paper: the first denoise step evaluates every neuron, the others the reference's."""

    def _call_ffns(self, plan: CallPlan, slot: int | None, donors: Sequence[int] = ()):
        context, neurons = super()._call_ffns(plan, slot, donors)
        if plan.neurons is None or slot is None:
            return context, neurons

        def ffn(x: torch.Tensor, mlp, layer: int, step: int = 0) -> torch.Tensor:
            return mlp(x) if step == 0 else neurons(x, mlp, layer, step)

        return context, ffn
