# SPDX-License-Identifier: Apache-2.0
"""The least time a policy call can take on a device, from its arithmetic and its memory traffic.

A stage is a list of operators, each max(FLOPs / peak, bytes / bandwidth), one after another. Weights are read once per
use, keys and values once per use, the residual stream once in and out; other activations stay on the chip. So the
times are floors, and ratios of floors are bounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from rmuscle_core.engine.plan import CallPlan
from rmuscle_core.model import ModelConfig
from rmuscle_core.settings import Settings

Operators = list[tuple[float, float]]  # (FLOPs, bytes)
PEAK_SECONDS = 2.0
COMPARED = Settings().token_references
GROUP = Settings().group_size  # denoise steps of a mask, of which the first may be dense


@dataclass(frozen=True)
class Peaks:
    """flops per second of matrix products, bytes per second of memory, and where the two numbers come from."""

    flops: float
    bandwidth: float
    source: str

    def milliseconds(self, operators: Operators) -> float:
        return 1e3 * sum(max(flops / self.flops, moved / self.bandwidth) for flops, moved in operators)


# 16-bit matrix products with float32 accumulation, dense. The fitted Jetson numbers are those at which this model
# meets published pi0.5 latencies of a tuned engine; its data sheet's peak is out of reach of today's kernels.
KNOWN = {
    'RTX 4090': Peaks(165e12, 1.01e12, 'data sheet'),
    'Jetson AGX Thor': Peaks(85e12, 0.26e12, 'fitted to published latencies'),
    'H200': Peaks(790e12, 4.3e12, 'what large products and copies reach'),
}


def stages(config: ModelConfig, views: int, text: int, plan: CallPlan, element: int) -> dict[str, Operators]:
    """Operators of one policy call; element is the size of a stored number in bytes."""
    tokens = views * config.vision.tokens
    rows = tokens + text
    return {'vision': _vision(config, views, element),
            'prefill attention': _prefill_attention(config, rows, element),
            'prefill ffn': _prefill_ffn(config, tokens, text, plan, element),
            'denoise attention': _denoise_attention(config, rows, element),
            'denoise ffn': _denoise_ffn(config, plan, element)}


def floors(config: ModelConfig, views: int, text: int, plan: CallPlan, element: int, peaks: Peaks) -> dict[str, float]:
    """Least milliseconds of each stage and 'total'."""
    each = {name: peaks.milliseconds(ops) for name, ops in stages(config, views, text, plan, element).items()}
    return {**each, 'total': sum(each.values())}


def work(config: ModelConfig, views: int, text: int, plan: CallPlan, element: int) -> tuple[float, float]:
    """FLOPs and bytes of one policy call."""
    operators = [o for ops in stages(config, views, text, plan, element).values() for o in ops]
    return sum(f for f, _ in operators), sum(b for _, b in operators)


def _linear(rows: float, weights: float, element: int, streamed: float = 0,
            stored: int | None = None) -> tuple[float, float]:
    return 2 * rows * weights, weights * (stored or element) + streamed * element


def _ffn_element(config: ModelConfig, element: int) -> int:
    """Bytes of one FFN weight; the scales of 8-bit ones are too few to count."""
    return 1 if config.weight_dtype == 'fp8' else element


def _vision(config: ModelConfig, views: int, element: int) -> Operators:
    v, rows = config.vision, views * config.vision.tokens
    patches = _linear(rows, 3 * v.patch**2 * v.width, element, rows * v.width)
    layer = [_linear(rows, 3 * v.width**2, element, 2 * rows * v.width), (4 * rows * v.tokens * v.width, 0),
             _linear(rows, v.width**2, element), _linear(rows, 2 * v.width * v.mlp, element, 2 * rows * v.width)]
    projector = _linear(rows, v.width * config.prefix.width, element, rows * config.prefix.width)
    return [patches, *layer * v.layers, projector]


def _prefill_attention(config: ModelConfig, rows: int, element: int) -> Operators:
    p, live = config.prefix, config.prefix.layers - 1
    queries, keys = p.heads * p.head_dim, 2 * p.kv_heads * p.head_dim
    layer = [_linear(rows, p.width * (queries + keys), element, rows * (p.width + keys)),
             (4 * rows**2 * queries, 0), _linear(rows, queries * p.width, element, 2 * rows * p.width)]
    return layer * live + [_linear(rows, p.width * keys, element, rows * (p.width + keys))]  # the last makes K and V


def _prefill_ffn(config: ModelConfig, tokens: int, text: int, plan: CallPlan, element: int) -> Operators:
    p = config.prefix
    kept = tokens if plan.tokens is None else plan.tokens
    layer = [_linear(kept + text, 3 * p.width * p.mlp, element, 2 * (kept + text) * p.width,
                     _ffn_element(config, element))]
    if kept < tokens:  # compare every token with its references; read and place what is reused
        layer.append((0, ((1 + COMPARED) * tokens + 2 * (tokens - kept)) * p.width * element))
    return layer * (p.layers - 1)


def _denoise_attention(config: ModelConfig, rows: int, element: int) -> Operators:
    e, suffix = config.expert, config.suffix_rows
    queries, keys = e.heads * e.head_dim, 2 * e.kv_heads * e.head_dim
    layer = [_linear(suffix, e.width * (queries + keys), element),
             (4 * suffix * (rows + suffix) * queries, (rows + suffix) * keys * element),
             _linear(suffix, queries * e.width, element)]
    step = layer * e.layers + [_linear(suffix, 2 * config.padded_dim * e.width, element)]
    return step * config.steps


def _denoise_ffn(config: ModelConfig, plan: CallPlan, element: int) -> Operators:
    e = config.expert
    neurons = plan.mean_neurons(e.mlp, config.steps, GROUP)
    residual = config.suffix_rows * e.width * (plan.residual != 'none' and neurons < e.mlp)
    layer = _linear(config.suffix_rows, 3 * e.width * neurons, element, residual, _ffn_element(config, element))
    return [layer] * (e.layers * config.steps)


def measure_peaks(device: torch.device, dtype: torch.dtype) -> Peaks:
    """The best of several large matrix products and copies on this device, with the threads it has now."""
    cuda = device.type == 'cuda'
    side, numbers = (8192, 2**28) if cuda else (1024, 2**25)
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    source = torch.ones(numbers, device=device)
    target = torch.empty_like(source)
    product = _fastest(lambda: torch.mm(a, b), cuda)
    copy = _fastest(lambda: target.copy_(source), cuda)
    return Peaks(2 * side**3 / product, 2 * source.nbytes / copy, 'measured before the run')


def _fastest(call: Callable[[], object], cuda: bool) -> float:
    """Least seconds of many repetitions, over long enough to meet a quiet moment of a shared machine."""
    best, end = float('inf'), time.perf_counter() + PEAK_SECONDS
    while (start := time.perf_counter()) < end:
        call()
        if cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best
