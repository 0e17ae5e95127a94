# SPDX-License-Identifier: Apache-2.0
"""``rmuscle bench``: whole policy calls on the engines the policy uses, each cache alone and both, against dense."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from rmuscle_core.bench.timing import Comparison, Work, interleave, synchronizer
from rmuscle_core.engine.build import build_engine
from rmuscle_core.engine.eager import EagerEngine
from rmuscle_core.engine.graphs import GraphEngine
from rmuscle_core.engine.plan import CallPlan, plan_call
from rmuscle_core.library import Reference, ReferenceId
from rmuscle_core.memory import Query, make_reference, rank
from rmuscle_core.model import VLA, ModelConfig
from rmuscle_core.processing import ModelInputs
from rmuscle_core.retrieval import make_key
from rmuscle_core.settings import PROFILES, Settings

BASELINE = 'dense'
Engine = EagerEngine | GraphEngine


@dataclass(frozen=True)
class Variant:
    """One way to make a policy call. slot: that of the reference expanded for this plan; None runs dense."""

    name: str
    engine: Engine
    plan: CallPlan
    slot: int | None


def random_inputs(config: ModelConfig, text: int, seed: int = 0) -> ModelInputs:
    """An observation as the processor would hand it over: smooth random views, a prompt of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(len(config.cameras), 3, 8, 8, generator=generator)
    side = config.vision.image_size
    images = torch.nn.functional.interpolate(coarse, (side, side), mode='bicubic').clamp(0, 1) * 2 - 1
    state = torch.zeros(config.padded_dim)
    state[:config.state_dim] = torch.rand(config.state_dim, generator=generator) * 2 - 1
    ids = torch.randint(config.vocab, (text,), generator=generator)
    return ModelInputs(images, config.cameras, ids, state, state[:config.state_dim].numpy())


def perturbed(inputs: ModelInputs, seed: int = 1) -> ModelInputs:
    """The same scene a little later: one patch of each view has changed, and the light by one percent."""
    generator = torch.Generator().manual_seed(seed)
    images = inputs.images * 1.01
    side = images.shape[-1] // 3
    images[:, :, side:2 * side, side:2 * side] = torch.rand(images.shape[0], 3, 1, 1, generator=generator) * 2 - 1
    return replace(inputs, images=images.clamp(-1, 1))


def record(engine: Engine, inputs: ModelInputs, identity: ReferenceId) -> Reference:
    """The library entry that a dense call on these inputs leaves, neurons ranked."""
    embedded = engine.embed(inputs)
    actions, _ = engine.act(embedded, CallPlan(), None)
    query = Query(make_key(embedded.visual, inputs.views), inputs.state_normalized[None], identity.task, inputs.views)
    chunk = actions[:, :engine.model.config.action_dim].numpy()
    reference = make_reference(identity, query, embedded.visual, inputs.token_ids, chunk)
    return replace(reference, neurons=rank(engine, reference))


def expand(engine: Engine, reference: Reference, slot: int, plan: CallPlan,
           checkpoint: Callable[[], None] = lambda: None) -> None:
    """Rebuild the reference's states in a slot, with the residual that the plan needs."""
    engine.expand(reference, slot, torch.from_numpy(reference.neurons.astype(np.int32)), plan, checkpoint)


def make_variants(model: VLA, settings: Settings, inputs: ModelInputs, compiled: bool = False) -> list[Variant]:
    """Dense, each cache alone at the default profile, and both at every profile; all on the engine a policy would use.

    The reference is a slightly different observation, expanded once per profile because its residual belongs to one
    number of neurons. Where that engine is not the eager one, its dense call is a variant too; compiled adds the
    eager one through torch.compile.
    """
    config, views = model.config, len(model.config.cameras)
    engine = build_engine(model, replace(settings, slots=len(PROFILES)), views)
    reference = record(engine, perturbed(inputs), ReferenceId('bench', 'reference', 0))
    embedded = engine.embed(inputs)
    tokens, text = embedded.tokens, embedded.text  # text as padded by the engine
    variants = [Variant(BASELINE, engine, CallPlan(), None)]
    plain = replace(settings, slots=1)
    if not isinstance(engine, EagerEngine):
        variants.append(Variant('dense_eager', EagerEngine(model, plain, views), CallPlan(), None))
    if compiled:
        variants.append(Variant('dense_compiled', EagerEngine(_compiled(model), plain, views), CallPlan(), None))
    slots = {profile: slot for slot, profile in enumerate(PROFILES)}
    for profile, slot in slots.items():
        plan = plan_call(Settings().with_values(profile=profile), config, tokens, text)
        expand(engine, reference, slot, plan)
    for mode, profile in (('context', 'default'), ('action', 'default'), *(('full', p) for p in PROFILES)):
        plan = plan_call(Settings().with_values(profile=profile, mode=mode), config, tokens, text)
        variants.append(Variant(f'{mode}.{profile}', engine, plan, slots[profile]))
    return variants


def _compiled(model: VLA) -> VLA:
    """The same weights with their methods compiled on first use."""
    twin = copy.copy(model)
    for method in ('embed_images', 'prefill', 'denoise'):
        object.__setattr__(twin, method, torch.compile(getattr(model, method)))
    return twin


def call(variant: Variant, inputs: ModelInputs) -> dict[str, float]:
    """One policy call from tensors to actions on the host; milliseconds per stage.

    Left out, being the same for all: decoding images and comparing keys (see ``--retrieval``).
    """
    start = time.perf_counter()
    embedded = variant.engine.embed(inputs)
    make_key(embedded.visual, inputs.views)  # ends on the host, so the device has finished the vision tower
    vision = 1e3 * (time.perf_counter() - start)
    _, stages = variant.engine.act(embedded, variant.plan, variant.slot)
    return {'vision': vision, **stages}


def compare_calls(variants: list[Variant], inputs: ModelInputs, rounds: int,
                  progress: Callable[[], object] = lambda: None, peers: Mapping[str, Work] | None = None) -> Comparison:
    """Interleave the variants, then the peers, with the dense call; see `interleave`."""
    def work(variant: Variant) -> Work:
        return lambda: call(variant, inputs)

    device = variants[0].engine.device
    works = {v.name: work(v) for v in variants} | dict(peers or {})
    return interleave(BASELINE, works, rounds, warm_up=3 if device.type == 'cuda' else 1,
                      synchronize=synchronizer(device), progress=progress)


class _Stopwatch:
    """A dense FFN that adds up the seconds spent in it; for a CPU, where a call returns when it is done."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, x: torch.Tensor, mlp, layer: int, step: int = 0) -> torch.Tensor:
        start = time.perf_counter()
        y = mlp(x)
        self.seconds += time.perf_counter() - start
        return y


@torch.inference_mode()
def time_shares(engine: EagerEngine, inputs: ModelInputs) -> dict[str, float]:
    """Share of one dense call's time by stage, FFNs apart from the rest, measured on a CPU."""
    prefill_ffn, denoise_ffn, marks = _Stopwatch(), _Stopwatch(), [time.perf_counter()]
    embedded = engine.embed(inputs)
    marks.append(time.perf_counter())
    cache = engine.model.prefill(embedded.prefix, prefill_ffn)
    marks.append(time.perf_counter())
    state = inputs.state[None] if engine.model.config.kind == 'pi0' else None
    engine.model.denoise(cache, engine.noise, denoise_ffn, state)
    marks.append(time.perf_counter())
    vision, prefill, denoise = np.diff(marks)
    parts = {'vision': vision, 'prefill attention': prefill - prefill_ffn.seconds, 'prefill ffn': prefill_ffn.seconds,
             'denoise attention': denoise - denoise_ffn.seconds, 'denoise ffn': denoise_ffn.seconds}
    return {name: round(float(seconds / (marks[-1] - marks[0])), 3) for name, seconds in parts.items()}
