# SPDX-License-Identifier: Apache-2.0
"""What gpu_check.py asks of the engine: correctness first, then whole calls, their parts, and what runs beside them."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch

from rmuscle_core.bench import roofline
from rmuscle_core.bench.calls import perturbed, random_inputs, record
from rmuscle_core.engine.eager import EagerEngine
from rmuscle_core.engine.graphs import GraphEngine, program_keys
from rmuscle_core.engine.lane import DirectLane
from rmuscle_core.engine.packed import PackedVLA
from rmuscle_core.engine.plan import CallPlan, bucket_of, plan_call
from rmuscle_core.engine.slot_ffn import SlotNeuronFFN
from rmuscle_core.engine.spread import even
from rmuscle_core.ffn import DenseFFN, Interrupted
from rmuscle_core.library import Reference, ReferenceId
from rmuscle_core.model import VLA
from rmuscle_core.retrieval import make_key
from rmuscle_core.settings import PROFILES, Settings
from rmuscle_kernels import runtime, tiles

SETTINGS = Settings(slots=4)
SPARE_SLOT = 3  # expanded into while calls read the others


def nothing() -> None:
    return None


@contextmanager
def geglu_by(tile: tiles.Tile | None) -> Iterator[None]:
    """Within, prefix FFNs use this fused tile on every GPU; None: cuBLAS and the activation kernel."""
    saved = dict(tiles.TABLE)
    tiles.TABLE.update({key: replace(row, geglu=tile) for key, row in saved.items()})
    try:
        yield
    finally:
        tiles.TABLE.update(saved)


@contextmanager
def early_launch() -> Iterator[None]:
    """Within, kernels are launched while their predecessors drain."""
    runtime.EARLY_LAUNCH = True
    try:
        yield
    finally:
        runtime.EARLY_LAUNCH = False


def largest(left: torch.Tensor, right: torch.Tensor) -> float:
    """Largest difference relative to the largest value of the second."""
    return ((left.float() - right.float()).abs().max() / right.float().abs().max()).item()


@torch.inference_mode()
def packed_against_plain(model: VLA, text: int) -> dict[str, float]:
    """Dense actions and prefix keys of both forwards in the model's dtype, as errors against float32."""
    config = model.config
    exact = VLA(replace(config, dtype='float32', rounded_rope=config.rounded_rope)).to(model.cos.device).eval()
    exact.load_state_dict(model.state_dict(), strict=False)
    exact.cos, exact.sin = model.cos.float(), model.sin.float()
    inputs = random_inputs(config, text)
    noise = torch.randn(1, config.chunk_size, config.padded_dim, device=model.cos.device)

    neurons = config.expert.mlp
    every = even(neurons, config.steps, config.expert.layers)
    folded = SlotNeuronFFN(None, every, neurons, 1, 'none')  # every neuron, so it needs no reference

    dense = DenseFFN()

    def run(vla, ffn=dense) -> tuple[torch.Tensor, torch.Tensor]:
        images, ids = inputs.images.to(noise.device), inputs.token_ids.to(noise.device)
        prefix = torch.cat([vla.embed_images(images).flatten(0, 1), vla.embed_prompt(ids)])[None]
        cache = vla.prefill(prefix, DenseFFN())
        rows = prefix.shape[1]
        keys = cache.k[-1][-rows:] if isinstance(vla, PackedVLA) else cache.k[-1][0, 0, :rows]
        return vla.denoise(cache, noise, ffn)[0], keys.clone()

    truth, plain = run(exact), run(model)
    packed = PackedVLA(model)
    seam, layers = run(packed), run(packed, folded)
    result = {'actions plain': largest(plain[0], truth[0]), 'actions packed': largest(seam[0], truth[0]),
              'actions folded': largest(layers[0], truth[0]),
              'keys plain': largest(plain[1], truth[1]), 'keys packed': largest(seam[1], truth[1])}
    for name in ('actions packed', 'actions folded', 'keys packed'):
        if not result[name] <= 2 * result[f'{name.split()[0]} plain'] + 1e-2:
            raise AssertionError(f'the packed forward is further from float32 than bfloat16 explains: {result}')
    return result


@dataclass
class Scene:
    """An engine with three profiles' worth of one reference expanded, and the observation that follows it."""

    engine: GraphEngine | EagerEngine
    inputs: object
    reference: Reference
    text: int

    def plan(self, mode: str, profile: str = 'default', **values) -> tuple[CallPlan, int | None]:
        """A call's plan and the slot whose residual fits it."""
        if mode == 'dense':
            return CallPlan(), None
        settings = SETTINGS.with_values(profile=profile, mode=mode, **values)
        plan = plan_call(settings, self.engine.model.config, self.reference.prefix.shape[0], self.text)
        return plan, list(PROFILES).index(profile)

    def call(self, plan: CallPlan, slot: int | None) -> torch.Tensor:
        """From tensors on the host to actions on the host, the retrieval key copied between as in a policy call."""
        embedded = self.engine.embed(self.inputs)
        make_key(embedded.visual, self.inputs.views)
        return self.engine.act(embedded, plan, slot)[0]


def make_scene(engine: GraphEngine | EagerEngine, text: int) -> Scene:
    inputs = random_inputs(engine.model.config, text)
    views = engine.arena.shape.tokens // engine.model.config.vision.tokens
    inputs = replace(inputs, images=inputs.images[:views], views=inputs.views[:views])
    reference = record(engine, inputs, ReferenceId('bench', 'episode', 0))
    graph = isinstance(engine, GraphEngine)
    scene = Scene(engine, perturbed(inputs), reference,
                  bucket_of(text, engine.model.config.prompt_length) if graph else text)
    for slot, profile in enumerate(PROFILES):
        expand(scene, slot, profile)
    return scene


def expand(scene: Scene, slot: int, profile: str = 'default', checkpoint: Callable[[], None] = nothing) -> None:
    neurons = torch.from_numpy(scene.reference.neurons.astype(np.int32))
    scene.engine.expand(scene.reference, slot, neurons, scene.plan('full', profile)[0], checkpoint)


def replay_against_eager(model: VLA, text: int) -> dict[str, object]:
    """Captured programs against the same bodies run directly, on the same packed weights."""
    packed = PackedVLA(model)
    graph = make_scene(GraphEngine(packed, SETTINGS, len(model.config.cameras)), text)
    lanes = DirectLane(packed.device), DirectLane(packed.device)
    direct = make_scene(GraphEngine(packed, SETTINGS, len(model.config.cameras), lanes), text)
    result = {}
    for mode in ('dense', 'context', 'action', 'full'):
        left, right = graph.call(*graph.plan(mode)), direct.call(*direct.plan(mode))
        result[mode] = {'bit-equal': torch.equal(left, right), 'error': largest(left, right)}
        if not result[mode]['error'] < 2e-2:
            raise AssertionError(f'{mode}: replay and direct run differ: {result[mode]}')
    return result


@contextmanager
def expanding(scene: Scene) -> Iterator[list[int]]:
    """Expand into the spare slot again and again on a thread of its own; yields a list that grows by one for each."""
    done, stop = [], threading.Event()
    failures: list[BaseException] = []

    def ask() -> None:
        if stop.is_set():
            raise Interrupted

    def run() -> None:
        try:
            while True:
                expand(scene, SPARE_SLOT, checkpoint=ask)
                done.append(1)
                ask()
        except Interrupted:
            pass
        except BaseException as failure:  # noqa: BLE001 - reported below, in the thread that checks
            failures.append(failure)

    expand(scene, SPARE_SLOT)
    thread = threading.Thread(target=run, name='reconstruct')
    thread.start()
    try:
        yield done
    finally:
        stop.set()
        thread.join()
    if failures:
        raise failures[0]


def replays_under_expansion(model: VLA, text: int, count: int) -> dict[str, object]:
    """Whether calls are bit-equal to the first while another slot is expanded beside them."""
    scene = make_scene(GraphEngine(model, SETTINGS, len(model.config.cameras)), text)
    plan, slot = scene.plan('full')
    first = scene.call(plan, slot)
    with expanding(scene) as done:
        different = sum(not torch.equal(scene.call(plan, slot), first) for _ in range(count))
    if different or not torch.isfinite(first).all():
        raise AssertionError(f'{different} of {count} calls differ from the first, finite: {first.isfinite().all()}')
    return {'calls': count, 'different': different, 'expansions meanwhile': len(done)}


def wall(call: Callable[[], object], count: int, warm_up: int = 3) -> dict[str, float]:
    """Milliseconds of a call that ends with its result on the host: p50, p95, p99."""
    for _ in range(warm_up):
        call()
    marks = [time.perf_counter()]
    for _ in range(count):
        call()
        marks.append(time.perf_counter())
    spans = np.array([1e3 * (b - a) for a, b in pairwise(marks)])
    return {f'p{p}': float(np.percentile(spans, p)) for p in (50, 95, 99)}


def program_times(scene: Scene, plan: CallPlan, count: int) -> dict[str, float]:
    """Median device milliseconds of each program of a call, replayed alone."""
    engine, config = scene.engine, scene.engine.model.config
    tokens = scene.reference.prefix.shape[0]
    views = tokens // config.vision.tokens
    prefill, denoise = program_keys(tokens + scene.text, plan)
    keys = {'embed': ('embed', views, scene.text), 'prefill': prefill, 'denoise': denoise}
    lane, result = engine.calls, {}
    with lane.running():
        for name, key in keys.items():
            marks = [lane.mark()]
            for _ in range(count):
                lane.replay(key)
                marks.append(lane.mark())
            lane.synchronize()
            result[name] = float(np.median([lane.milliseconds(a, b) for a, b in pairwise(marks)]))
    return result


def measure(scene: Scene, mode: str, profile: str, count: int, peaks: roofline.Peaks, **values) -> dict[str, object]:
    """One row of the bench table."""
    plan, slot = scene.plan(mode, profile, **values)
    settings, config = scene.engine.settings, scene.engine.model.config
    neurons = plan.mean_neurons(config.expert.mlp, config.steps, settings.group_size)
    row: dict[str, object] = {'tokens': plan.tokens, 'neurons': neurons, 'residual': plan.residual}
    row |= wall(lambda: scene.call(plan, slot), count)
    views, text = len(scene.inputs.views), scene.inputs.token_ids.shape[0]
    flops, moved = roofline.work(config, views, text, plan, 2)
    operators = [o for ops in roofline.stages(config, views, text, plan, 2).values() for o in ops]
    row |= {'tflops': flops / row['p50'] / 1e9, 'gbs': moved / row['p50'] / 1e6, 'floor': peaks.milliseconds(operators)}
    if isinstance(scene.engine, GraphEngine):
        row['device'] = program_times(scene, plan, count)
    return row


def reconstruction(scene: Scene, count: int) -> dict[str, object]:
    """Call latency with and without expansion beside it, and expansions a second with nothing beside them."""
    plan, slot = scene.plan('full')
    off = wall(lambda: scene.call(plan, slot), count)
    with expanding(scene) as done:
        on = wall(lambda: scene.call(plan, slot), count)
    beside = len(done)
    start = time.perf_counter()
    for _ in range(max(count // 10, 1)):
        expand(scene, SPARE_SLOT)
    alone = (time.perf_counter() - start) / max(count // 10, 1)
    return {'off': off, 'on': on, 'p99 ratio': on['p99'] / off['p99'], 'expansions meanwhile': beside,
            'ms per expansion alone': 1e3 * alone, 'expansions per second': 1 / alone}


def kernel_counts(scene: Scene, mode: str) -> list[dict[str, object]]:
    """Kernels of one call by device time, from torch.profiler."""
    from torch.profiler import ProfilerActivity, profile
    plan, slot = scene.plan(mode)
    scene.call(plan, slot)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        scene.call(plan, slot)
    rows = [{'kernel': e.key[:90], 'count': e.count, 'us': e.self_device_time_total} for e in profiled.key_averages()]
    rows.sort(key=lambda row: -row['us'])
    total = {'kernel': 'all', 'count': sum(r['count'] for r in rows), 'us': sum(r['us'] for r in rows)}
    return [total, *rows[:30]]


def release() -> None:
    """Give back what deleted engines held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
