# SPDX-License-Identifier: Apache-2.0
"""The memory budget against what is really allocated, and the figures it gives for pi0.5."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engine_parts import small_config, small_model

from rmuscle_core import memory_free
from rmuscle_core.engine import budget
from rmuscle_core.engine.graphs import GraphEngine
from rmuscle_core.errors import SettingsError
from rmuscle_core.model import VLA, ModelConfig, TransformerConfig, VisionConfig
from rmuscle_core.settings import Settings

PI05 = ModelConfig('pi05', VisionConfig(), TransformerConfig(2048, 18, 16384), TransformerConfig(1024, 18, 4096),
                   vocab=257152, cameras=('a', 'b', 'c'), state_dim=14, action_dim=14, dtype='bfloat16',
                   numerics='fast')


def size(*tensors: torch.Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize('settings', [Settings(slots=3), Settings(slots=2, sketch_width=8, residual='none')])
def test_items_equal_what_the_engine_allocates(settings):
    model = small_model()
    items = budget.memory_budget(small_config(), settings, views=2)
    engine = GraphEngine(model, settings, views=2)
    assert items['weights'] == size(*model.parameters())
    assert sum(v for k, v in items.items() if k.startswith('references')) == engine.arena.nbytes
    caches = [prompted.cache for prompted in (engine._call, engine._expansion)]
    assert items['keys and values'] == size(*(t for cache in caches for t in (cache.k, cache.v)))
    expert = engine.model.expert
    assert items['modulations'] == size(expert.modulations, *(t for pair in expert.offsets for t in pair))
    assert items['total'] == sum(v for k, v in items.items() if k != 'total')


def test_eight_bit_weights_are_counted_as_they_are_held():
    whole, config = small_config(), replace(small_config(), weight_dtype='fp8')
    items = budget.memory_budget(config, Settings(), views=2)
    assert items['weights'] == size(*VLA(config).parameters())
    ffns = 2 * 32 * 48 + 3 * 16 * 24  # live layers x width x neurons; each is three matrices with a scale per neuron
    saved = 3 * (ffns * (4 - 1) - 4 * (2 * 48 + 3 * 24))
    assert items['weights'] == budget.memory_budget(whole, Settings(), views=2)['weights'] - saved
    assert items['widened weights'] == 2 * 32 * 48 * 4


def test_real_size_figures():
    items = budget.memory_budget(PI05, Settings(slots=1), views=3)
    # 3.35e9 live parameters; 17 layers x 768 tokens x 2048 x 2 bytes, inputs and outputs each
    assert 6.5e9 < items['weights'] < 7.2e9
    assert items['references: inputs'] == items['references: outputs'] == 17 * 768 * 2048 * 2
    assert items['references: residual'] == 10 * 18 * 50 * 1024 * 2
    sketched = budget.memory_budget(PI05, Settings(slots=1, sketch_width=64), views=3)
    assert sketched['references: inputs'] + sketched['references: outputs'] < 60e6


def test_too_much_is_refused_before_anything_is_allocated(monkeypatch):
    monkeypatch.setattr(budget, 'available_bytes', lambda device: int(8e9))
    settings = Settings(slots=100)
    items = budget.memory_budget(PI05, settings, views=3)
    with pytest.raises(SettingsError, match=r'100 reference slots need \d+\.\d+ GB.*8\.00 GB free; lower slots'):
        budget.require_memory(items, settings.slots, torch.device('cuda'))
    small = replace(PI05, vocab=1000)
    budget.require_memory(budget.memory_budget(small, Settings(slots=1), 1), 1, torch.device('cuda'))


def test_slots_are_counted_by_what_is_free(monkeypatch):
    config, settings = small_config(), Settings(slots=10)
    needs = {slots: sum(v for k, v in budget.memory_budget(config, replace(settings, slots=slots), 2).items()
                        if k not in ('weights', 'total')) for slots in (0, 1, 3)}
    for free, slots in ((needs[0], 0), (needs[3] + 1000, 3), (10**12, 10)):
        monkeypatch.setattr(budget, 'available_bytes', lambda device, free=free: free)
        assert budget.affordable_slots(config, settings, 2, torch.device('cuda')) == slots
    monkeypatch.setattr(budget, 'available_bytes', lambda device: needs[0] - 1)
    with pytest.raises(SettingsError, match='a dense policy call needs'):
        budget.affordable_slots(config, settings, 2, torch.device('cuda'))


@pytest.mark.parametrize(('integrated', 'free'), [(True, 90 * 1024**3), (False, 10**9)])
def test_v31_a_gpu_that_shares_the_hosts_memory_has_what_the_host_can_give(monkeypatch, tmp_path, integrated, free):
    meminfo = tmp_path / 'meminfo'
    meminfo.write_text(f'MemTotal: {128 * 1024**2} kB\nMemFree: 900000 kB\nMemAvailable: {90 * 1024**2} kB\n')
    monkeypatch.setattr(memory_free, 'MEMINFO', meminfo)
    monkeypatch.setattr(memory_free, 'is_integrated', lambda device: integrated)
    monkeypatch.setattr(torch.cuda, 'mem_get_info', lambda device: (10**9, 128 * 1024**3))
    assert memory_free.available_bytes(torch.device('cuda')) == free
    assert memory_free.available_bytes(torch.device('cpu')) == 90 * 1024**3
