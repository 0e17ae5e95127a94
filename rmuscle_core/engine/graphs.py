# SPDX-License-Identifier: Apache-2.0
"""The fast path: packed weights, static buffers, and every stage of a call a program replayed on its lane.

What varies from call to call is data on the device: the observation, the number of valid prompt rows, the slot of the
reference. What varies in shape is part of a program's key: views, prompt bucket, rows and neurons recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from rmuscle_core.arena import ReferenceArena
from rmuscle_core.engine.eager import Embedded, initial_noise, yielding
from rmuscle_core.engine.faults import free_device_memory
from rmuscle_core.engine.lane import Checkpoint, Lane, make_lanes
from rmuscle_core.engine.packed import PackedVLA
from rmuscle_core.engine.plan import CallPlan, arena_shape, bucket_of, plan_call
from rmuscle_core.engine.slot_ffn import SlotContextFFN, SlotNeuronFFN, SlotRecordFFN, SlotResidualFFN
from rmuscle_core.engine.spread import even
from rmuscle_core.errors import EpisodeError
from rmuscle_core.ffn import DenseFFN, ScoreFFN
from rmuscle_core.library import Reference
from rmuscle_core.model import VLA
from rmuscle_core.model.guidance import Guidance
from rmuscle_core.processing import ModelInputs
from rmuscle_core.settings import Settings


class _Prompted:
    """Static buffers of one lane: a prefix with its prompt, and the keys and values made of it."""

    def __init__(self, packed: PackedVLA, tokens: int) -> None:
        room, width = packed.config.prompt_length, packed.config.prefix.width
        self.packed = packed
        self.ids = torch.zeros(room, dtype=torch.int64, device=packed.device)
        self.prefix = torch.zeros(1, tokens + room, width, dtype=packed.dtype, device=packed.device)
        self.n_valid = torch.zeros(1, dtype=torch.int32, device=packed.device)
        self.cache = packed.new_cache(tokens + room)

    def load(self, ids: torch.Tensor, tokens: int) -> int:
        """Take a prompt int64 [P] that follows this many visual rows; return its bucket."""
        length = ids.shape[0]
        bucket = bucket_of(length, self.packed.config.prompt_length)
        padded = torch.zeros(bucket, dtype=torch.int64)
        padded[:length] = ids
        self.ids[:bucket].copy_(padded, non_blocking=True)
        self.n_valid.fill_(tokens + length)
        return bucket

    def embed_prompt(self, tokens: int, bucket: int) -> None:
        self.prefix[0, tokens:tokens + bucket] = self.packed.embed_prompt(self.ids[:bucket])

    def prefill(self, rows: int, ffn) -> None:
        self.packed.prefill(self.prefix[:, :rows], ffn, self.n_valid, self.cache)


class GraphEngine:
    """Same methods as EagerEngine, same results up to rounding; see there for the threads.

    Programs are captured on first use, or beforehand by ``prepare``. An Embedded is a view of static memory: it is
    valid until the next ``embed``, and only the latest can be acted on.
    lanes: where calls and expansions run; None: a CUDA stream each, or the host on a CPU.
    """

    def __init__(self, model: VLA | PackedVLA, settings: Settings, views: int,
                 lanes: tuple[Lane, Lane] | None = None) -> None:
        self.model, self.settings = model if isinstance(model, PackedVLA) else PackedVLA(model), settings
        config, self.device = model.config, self.model.device
        device, cuda = self.device, self.device.type == 'cuda'
        self.calls, self.spare = lanes or make_lanes(device)
        tokens, side = views * config.vision.tokens, config.vision.image_size
        self.arena = ReferenceArena(arena_shape(settings, config, tokens), settings.slots, self.model.dtype, device,
                                    settings.token_references)
        self.noise = initial_noise(config, settings).to(device)
        self._call, self._expansion = _Prompted(self.model, tokens), _Prompted(self.model, tokens)
        self._expanded_slot = torch.zeros(1, dtype=torch.int64, device=device)
        self._images = torch.zeros(views, 3, side, side, device=device)
        self._staged = torch.zeros(views, 3, side, side, pin_memory=cuda)
        self._actions, self._target, self._weights = (
            torch.zeros(config.chunk_size, config.padded_dim, device=device) for _ in range(3))
        self._chunk = torch.zeros(config.chunk_size, config.padded_dim, pin_memory=cuda)
        self._latest: Embedded | None = None
        self.problems: list[str] = []  # what was asked for and could not be had, one sentence each

    @property
    def captures(self) -> int:
        """Programs captured so far, those dropped since included."""
        return self.calls.captures + self.spare.captures

    def shrink(self, slots: int) -> None:
        """Give memory back: the arena keeps this many slots, empty. Nobody may be using it.

        Programs hold its addresses, so they go too; a call captures its own again.
        """
        self.calls.forget()
        self.spare.forget()
        self.arena.hold(0)
        free_device_memory(self.device)
        self.arena.hold(slots)

    @torch.inference_mode()
    def prepare(self, settings: Settings, text: int) -> None:
        """Capture what calls with all views need under these settings, for prompts of about ``text`` tokens; blocks.

        The state is part of a pi0.5 prompt, so its length varies a little: neighbouring buckets are captured too.
        """
        config, tokens = self.model.config, self.arena.shape.tokens
        views = tokens // config.vision.tokens
        near = {bucket_of(min(max(text + shift, 1), config.prompt_length), config.prompt_length)
                for shift in (-16, 0, 16)}
        self._latest = None  # capturing runs each program, over the same buffers
        with self.calls.running():
            for rows in sorted(near):
                self.calls.prepare(('embed', views, rows), partial(self._embed, views, rows))
                cached = [plan_call(settings, config, tokens, rows)] if self.arena.slots else []
                for plan in (CallPlan(), *cached):
                    self._prepare_call(tokens + rows, plan)
                    if settings.rtc != 'off':
                        self._prepare_call(tokens + rows, plan, settings.rtc_weight)

    @torch.inference_mode()
    def embed(self, inputs: ModelInputs) -> Embedded:
        views = inputs.images.shape[0]
        tokens = views * self.model.config.vision.tokens
        with self.calls.running():
            bucket = self._call.load(inputs.token_ids, tokens)
            self._staged[:views].copy_(inputs.images)
            self._images[:views].copy_(self._staged[:views], non_blocking=True)
            key = ('embed', views, bucket)
            self.calls.prepare(key, partial(self._embed, views, bucket))
            self.calls.replay(key)
        self._latest = Embedded(self._call.prefix[:, :tokens + bucket], tokens, inputs)
        return self._latest

    @torch.inference_mode()
    def act(self, embedded: Embedded, plan: CallPlan, slot: int | None,
            donors: Sequence[int] = ()) -> tuple[torch.Tensor, dict[str, float]]:
        """Return actions float32 [H, A_pad] on the host and milliseconds per stage; see EagerEngine.act."""
        if embedded is not self._latest:
            raise RuntimeError('only the latest embed can be acted on; its memory has been written again since')
        if slot is None:
            plan = CallPlan()
        elif embedded.tokens != self.arena.shape.tokens:  # other views than the references have: nothing to compare
            plan = CallPlan(None, plan.neurons, plan.residual)
        calls, guidance = self.calls, embedded.inputs.guidance
        with calls.running():
            if slot is not None:
                self.arena.point_to(slot, donors)
            if guidance is not None:
                self._target.copy_(guidance.target, non_blocking=True)
                self._weights.copy_(guidance.weights, non_blocking=True)
            prefill, denoise = self._prepare_call(embedded.prefix.shape[1], plan, guidance and guidance.limit)
            start = calls.mark()
            calls.replay(prefill)
            middle = calls.mark()
            calls.replay(denoise)
            end = calls.mark()
            self._chunk.copy_(self._actions, non_blocking=True)
            calls.synchronize()
        return self._chunk.clone(), {'prefill': calls.milliseconds(start, middle),
                                     'denoise': calls.milliseconds(middle, end)}

    @torch.inference_mode()
    def expand(self, reference: Reference, slot: int, neurons: torch.Tensor | None, plan: CallPlan,
               checkpoint: Callable[[], None]) -> None:
        """Rebuild the reference's FFN states in a slot nobody reads; raises Interrupted from checkpoint.

        neurons: its ranking, int32 [G, M, masked or more]; None where the plan has no use for one.
        """
        spare, tokens = self.spare, self.arena.shape.tokens
        with spare.running():
            try:
                bucket = self._load_reference(reference)
                self._expanded_slot.fill_(slot)
                if neurons is not None:
                    self.arena.neurons[slot].copy_(neurons[..., :self.arena.shape.masked])
                record = ('record', bucket)
                spare.prepare(record, lambda cut: self._expansion.prefill(
                    tokens + bucket, SlotRecordFFN(self.arena, self._expanded_slot, cut)))
                spare.replay(record, checkpoint)
                if plan.stored_residual and plan.neurons is not None:
                    residual = ('residual', plan.neurons)
                    spare.prepare(residual, lambda cut: self._denoise(self._expansion, SlotResidualFFN(
                        self.arena, self._expanded_slot, plan.neurons, self.settings.group_size, cut)))
                    spare.replay(residual, checkpoint)
            finally:
                spare.synchronize()

    @torch.inference_mode()
    def rank_neurons(self, reference: Reference, checkpoint: Callable[[], None]) -> torch.Tensor:
        """Contribution ranking of the reference's own denoising: int32 [G, M, masked] on the host."""
        shape, tokens = self.arena.shape, self.arena.shape.tokens
        with self.spare.running():
            ask = self.spare.paced(checkpoint)
            score = ScoreFFN(shape.groups, shape.action_layers, self.model.config.expert.mlp,
                             self.settings.group_size, self.model.device, ask)

            bucket = self._load_reference(reference)
            self._expansion.prefill(tokens + bucket, yielding(ask))
            self._denoise(self._expansion, score)
            return score.ranked(shape.masked).cpu()

    @torch.inference_mode()
    def dense(self, embedded: Embedded, checkpoint: Callable[[], None]) -> torch.Tensor:
        """Repeat a call without references on the reconstruct thread: actions float32 [H, A_pad] on the host.

        embedded: with a prefix of its own. Nothing is captured for what happens once in many calls.
        """
        rows, guidance = embedded.prefix.shape[1], embedded.inputs.guidance
        with self.spare.running():
            ask = self.spare.paced(checkpoint)
            self._expansion.load(embedded.inputs.token_ids, embedded.tokens)
            self._expansion.prefix[:, :rows].copy_(embedded.prefix)
            self._expansion.prefill(rows, yielding(ask))
            return self._denoise(self._expansion, _unfused(ask), guidance and guidance.to(self.device)).float().cpu()

    def _prepare_call(self, rows: int, plan: CallPlan, limit: float | None = None) -> tuple[tuple, tuple]:
        """Capture what is not yet; return the keys of prefill and denoise.

        limit: of the guidance, None without. Guided steps cannot be folded into one another, so they take the kernels
        of a single FFN, with a few launches more.
        """
        prefill, denoise = program_keys(rows, plan, limit)
        guidance = None if limit is None else Guidance(self._target, self._weights, limit)
        context = DenseFFN() if plan.tokens is None else SlotContextFFN(self.arena, plan.tokens)
        self.calls.prepare(prefill, lambda cut: self._call.prefill(rows, context))
        self.calls.prepare(denoise, lambda cut: self._actions.copy_(
            self._denoise(self._call, self._neurons(plan), guidance)))
        return prefill, denoise

    def _neurons(self, plan: CallPlan) -> SlotNeuronFFN:
        """Made inside the program, so that what it carries from step to step lies in the pool that programs share."""
        total, shape = self.model.config.expert.mlp, self.arena.shape
        neurons = plan.neurons or even(total, shape.groups, shape.action_layers)
        return SlotNeuronFFN(self.arena, neurons, total, self.settings.group_size, plan.residual)

    def _embed(self, views: int, bucket: int, cut: Checkpoint) -> None:
        tokens = views * self.model.config.vision.tokens
        self._call.prefix[0, :tokens] = self.model.embed_images(self._images[:views]).flatten(0, 1)
        self._call.embed_prompt(tokens, bucket)

    def _denoise(self, prompted: _Prompted, ffn, guidance: Guidance | None = None) -> torch.Tensor:
        return self.model.denoise(prompted.cache, self.noise, ffn, guidance=guidance)[0]

    def _load_reference(self, reference: Reference) -> int:
        tokens = self.arena.shape.tokens
        if reference.prefix.shape[0] != tokens:
            raise EpisodeError(f'{reference.id} has {reference.prefix.shape[0]} visual tokens, this policy {tokens}: '
                               'it was recorded with other cameras, so record the task again with these')
        bucket = self._expansion.load(torch.as_tensor(reference.token_ids, dtype=torch.int64), tokens)
        self._expansion.prefix[0, :tokens] = reference.prefix.to(self.model.device)
        self._expansion.embed_prompt(tokens, bucket)
        return bucket


def _unfused(checkpoint: Callable[[], None]) -> Callable[..., torch.Tensor]:
    """`yielding` for the expert, by plain products: the scratch of its fused kernels belongs to the calls."""
    def ffn(x: torch.Tensor, mlp, layer: int, step: int = 0) -> torch.Tensor:
        checkpoint()
        return mlp.down(mlp.activations(x))

    return ffn


def program_keys(rows: int, plan: CallPlan, limit: float | None = None) -> tuple[tuple, tuple]:
    """Names of the captured prefill and denoising of a call with so many rows; limit: of the guidance, None without."""
    return ('prefill', rows, plan.tokens), ('denoise', plan.neurons, plan.residual, limit)
