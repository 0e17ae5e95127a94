# SPDX-License-Identifier: Apache-2.0
"""Operator counts against closed forms and against the network itself."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from rmuscle_core.bench import roofline
from rmuscle_core.bench.sizes import PI05, SIZES, TEXT, random_model
from rmuscle_core.engine.plan import CallPlan
from rmuscle_core.engine.spread import even
from rmuscle_core.ffn import DenseFFN


def flops(config, views, text, plan=None):
    return roofline.work(config, views, text, plan or CallPlan(), 2)[0]


def test_flops_of_a_dense_call_are_those_the_network_does():
    config = SIZES['tiny']
    model, text = random_model(config, torch.device('cpu')), TEXT['tiny']
    side = config.vision.image_size
    # the counter knows plain products, not the CPU's fused attention
    with FlopCounterMode(display=False) as counter, torch.inference_mode(), sdpa_kernel(SDPBackend.MATH):
        model.modulations()
        before = counter.get_total_flops()
        visual = model.embed_images(torch.zeros(2, 3, side, side)).flatten(0, 1)
        prefix = torch.cat([visual, model.embed_prompt(torch.zeros(text, dtype=torch.int64))])[None]
        cache = model.prefill(prefix, DenseFFN())
        model.denoise(cache, torch.zeros(1, config.chunk_size, config.padded_dim), DenseFFN())
    assert flops(config, 2, text) == pytest.approx(counter.get_total_flops() - before, rel=0.02)


def test_ffn_bytes_and_flops_at_full_size():
    ffn = roofline.stages(PI05, 3, 32, CallPlan(), 2)
    rows, weights = 768 + 32, 3 * 2048 * 16384
    assert sum(f for f, _ in ffn['prefill ffn']) == 17 * 2 * rows * weights
    assert sum(b for _, b in ffn['denoise ffn']) == 18 * 10 * 3 * 1024 * 4096 * 2


def test_a_cached_plan_lowers_only_what_it_skips():
    peaks = roofline.Peaks(1e14, 1e12, 'test')
    dense = roofline.floors(PI05, 3, 32, CallPlan(), 2, peaks)
    cached = roofline.floors(PI05, 3, 32, CallPlan(384, even(2048, 2, 18), 'reference'), 2, peaks)
    assert cached['vision'] == dense['vision'] and cached['prefill attention'] == dense['prefill attention']
    assert cached['prefill ffn'] < 0.6 * dense['prefill ffn']
    assert 0.5 * dense['denoise ffn'] < cached['denoise ffn'] < 0.52 * dense['denoise ffn']
    plan = CallPlan(384, even(2048, 2, 18), 'anchored')  # two of ten steps are dense
    anchored = roofline.floors(PI05, 3, 32, plan, 2, peaks)
    assert 0.6 * dense['denoise ffn'] < anchored['denoise ffn'] < 0.62 * dense['denoise ffn']
    assert cached['total'] == pytest.approx(sum(v for k, v in cached.items() if k != 'total'))


def test_a_stage_is_bound_by_the_slower_of_arithmetic_and_memory():
    peaks = roofline.Peaks(flops=10.0, bandwidth=2.0, source='test')
    assert peaks.milliseconds([(20.0, 1.0), (1.0, 8.0)]) == 1e3 * (2.0 + 4.0)
