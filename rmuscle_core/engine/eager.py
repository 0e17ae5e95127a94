# SPDX-License-Identifier: Apache-2.0
"""The plain path: the model as it is, one FFN object per call."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rmuscle_core.arena import ReferenceArena
from rmuscle_core.engine.faults import free_device_memory
from rmuscle_core.engine.plan import CallPlan, arena_shape
from rmuscle_core.ffn import ContextFFN, DenseFFN, NeuronFFN, RecordFFN, ResidualFFN, ScoreFFN
from rmuscle_core.library import Reference
from rmuscle_core.model import VLA, ModelConfig
from rmuscle_core.model.prefix import FFN
from rmuscle_core.processing import ModelInputs
from rmuscle_core.settings import Settings


@dataclass(frozen=True)
class Embedded:
    """Prefix embeddings [1, T + P, D] of one observation; the first ``tokens`` rows are visual."""

    prefix: torch.Tensor
    tokens: int
    inputs: ModelInputs

    @property
    def visual(self) -> torch.Tensor:
        return self.prefix[0, :self.tokens]

    @property
    def text(self) -> int:
        return self.prefix.shape[1] - self.tokens


class EagerEngine:
    """Computes on the model's own device; ``arena`` holds the expanded references.

    ``act`` runs on the inference thread, ``expand`` and ``rank_neurons`` on the reconstruct thread, side by side.
    """

    captures = 0  # nothing is captured here; see GraphEngine

    def __init__(self, model: VLA, settings: Settings, views: int) -> None:
        self.model, self.settings = model, settings
        self.device, self.dtype = model.cos.device, model.config.compute_dtype
        shape = arena_shape(settings, model.config, views * model.config.vision.tokens)
        self.arena = ReferenceArena(shape, settings.slots, self.dtype, self.device, settings.token_references)
        self.noise = initial_noise(model.config, settings).to(self.device)
        self.problems: list[str] = []  # what was asked for and could not be had, one sentence each
        self.recomputed: list[torch.Tensor] = []  # rows recomputed by the last call, per prefix layer that chose them
        self._workspace: dict = {}  # of the inference thread's NeuronFFN, from call to call

    def prepare(self, settings: Settings, text: int) -> None:
        """Nothing is made in advance here; see GraphEngine."""

    def shrink(self, slots: int) -> None:
        """Give memory back: the arena keeps this many slots, empty. Nobody may be using it."""
        self.arena.hold(0)
        free_device_memory(self.device)
        self.arena.hold(slots)

    @torch.inference_mode()
    def embed(self, inputs: ModelInputs) -> Embedded:
        images = inputs.images.to(self.device)
        visual = self.model.embed_images(images).flatten(0, 1)
        text = self.model.embed_prompt(inputs.token_ids.to(self.device))
        return Embedded(torch.cat([visual, text.to(visual.dtype)])[None], visual.shape[0], inputs)

    @torch.inference_mode()
    def act(self, embedded: Embedded, plan: CallPlan, slot: int | None,
            donors: Sequence[int] = ()) -> tuple[torch.Tensor, dict[str, float]]:
        """Return actions float32 [H, A_pad] on the host and milliseconds per stage.

        slot: of the reference, None for a dense call. donors: other slots whose prefix outputs tokens may reuse.
        """
        context, neurons = self._call_ffns(plan, slot, donors)
        start = time.perf_counter()
        cache = self.model.prefill(embedded.prefix, context)
        self._synchronize()
        middle = time.perf_counter()
        guidance = embedded.inputs.guidance
        actions = self.model.denoise(cache, self.noise, neurons, self._state(embedded.inputs.state),
                                     guidance and guidance.to(self.device))
        actions = actions[0].float().cpu()
        end = time.perf_counter()
        return actions, {'prefill': 1e3 * (middle - start), 'denoise': 1e3 * (end - middle)}

    @torch.inference_mode()
    def expand(self, reference: Reference, slot: int, neurons: torch.Tensor | None, plan: CallPlan,
               checkpoint: Callable[[], None]) -> None:
        """Rebuild the reference's FFN states in a slot nobody reads; raises Interrupted from checkpoint.

        neurons: its ranking, int32 [G, M, masked or more]; None where the plan has no use for one.
        """
        if neurons is not None:
            self.arena.neurons[slot].copy_(neurons[..., :self.arena.shape.masked])
        residual = None
        if plan.stored_residual and plan.neurons is not None:
            residual = ResidualFFN(self.arena, slot, plan.neurons, self.settings.group_size, checkpoint)
        self.rerun(reference, RecordFFN(self.arena, slot, checkpoint), residual)
        self._synchronize()

    @torch.inference_mode()
    def rank_neurons(self, reference: Reference, checkpoint: Callable[[], None]) -> torch.Tensor:
        """Contribution ranking of the reference's own denoising: int32 [G, M, masked] on the host."""
        shape, config = self.arena.shape, self.model.config
        score = ScoreFFN(shape.groups, shape.action_layers, config.expert.mlp, self.settings.group_size, self.device,
                         checkpoint)
        self.rerun(reference, yielding(checkpoint), score)
        return score.ranked(shape.masked).cpu()

    @torch.inference_mode()
    def rerun(self, reference: Reference, prefix_ffn: FFN, expert_ffn: FFN | None) -> torch.Tensor | None:
        """Make the reference's call again with these FFNs: actions [1, H, A_pad], None without a denoising."""
        cache = self.model.prefill(self._prefix(reference), prefix_ffn)
        if expert_ffn is None:
            return None
        return self.model.denoise(cache, self.noise, expert_ffn, self._state(self._padded(reference)))

    @torch.inference_mode()
    def dense(self, embedded: Embedded, checkpoint: Callable[[], None]) -> torch.Tensor:
        """Repeat a call without references on the reconstruct thread: actions float32 [H, A_pad] on the host.

        embedded: with a prefix of its own. Raises Interrupted from checkpoint.
        """
        ffn, guidance = yielding(checkpoint), embedded.inputs.guidance
        cache = self.model.prefill(embedded.prefix, ffn)
        return self.model.denoise(cache, self.noise, ffn, self._state(embedded.inputs.state),
                                  guidance and guidance.to(self.device))[0].float().cpu()

    def _call_ffns(self, plan: CallPlan, slot: int | None, donors: Sequence[int] = ()):
        self.recomputed = []
        if slot is None:
            return DenseFFN(), DenseFFN()
        self.arena.point_to(slot, donors)
        context = DenseFFN() if plan.tokens is None else ContextFFN(self.arena, plan.tokens, self.recomputed)
        neurons = DenseFFN() if plan.neurons is None else NeuronFFN(
            self.arena, plan.neurons, self.settings.group_size, plan.residual, self._workspace)
        return context, neurons

    def _prefix(self, reference: Reference) -> torch.Tensor:
        visual = reference.prefix.to(self.device, self.dtype)
        ids = torch.as_tensor(reference.token_ids, dtype=torch.int64, device=self.device)
        return torch.cat([visual, self.model.embed_prompt(ids).to(self.dtype)])[None]

    def _padded(self, reference: Reference) -> torch.Tensor:
        state = torch.zeros(self.model.config.padded_dim)
        newest = torch.as_tensor(reference.states[-1])
        state[:newest.shape[0]] = newest
        return state

    def _state(self, state: torch.Tensor) -> torch.Tensor | None:
        return state[None].to(self.device) if self.model.config.kind == 'pi0' else None

    def _synchronize(self) -> None:
        if self.device.type == 'cuda':
            torch.cuda.current_stream(self.device).synchronize()


def initial_noise(config: ModelConfig, settings: Settings) -> torch.Tensor:
    """What every call and every reference is denoised from, [1, H, A_pad], equal on every device."""
    generator = torch.Generator().manual_seed(settings.noise_seed)
    return torch.randn(1, config.chunk_size, config.padded_dim, generator=generator)


def yielding(checkpoint: Callable[[], None]) -> Callable[..., torch.Tensor]:
    """The dense FFN for work that a due call may interrupt before any layer."""
    def ffn(x: torch.Tensor, mlp, layer: int, step: int = 0) -> torch.Tensor:
        checkpoint()
        return mlp(x)

    return ffn
