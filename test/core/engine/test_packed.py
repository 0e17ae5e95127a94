# SPDX-License-Identifier: Apache-2.0
"""The packed forward against the plain one: dense, padded, cached, and the VLA that shares its weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rmuscle_core.arena import ReferenceArena
from rmuscle_core.engine.packed import PackedVLA
from rmuscle_core.engine.plan import CallPlan, arena_shape
from rmuscle_core.engine.slot_ffn import SlotContextFFN, SlotNeuronFFN, SlotRecordFFN, SlotResidualFFN
from rmuscle_core.engine.spread import even
from rmuscle_core.errors import CheckpointError
from rmuscle_core.ffn import ContextFFN, DenseFFN, NeuronFFN, RecordFFN, ResidualFFN, ScoreFFN
from rmuscle_core.model.checkpoint import load_model
from rmuscle_core.settings import Settings

PARITY = Path(__file__).parents[2] / 'data' / 'parity' / 'tiny_pi05_float32'
SETTINGS = Settings(slots=3)
TEXT = 11
# neurons differ by step and layer, as they do in a call
PLAN = CallPlan(tokens=9, neurons=tuple(tuple(28 + (7 * g + 5 * m) % 20 for m in range(8)) for g in range(10)))


@pytest.fixture
def parity():
    return load_model(PARITY).eval()


def prefix_of(config, seed: int) -> torch.Tensor:
    rows = 2 * config.vision.tokens + TEXT
    return torch.randn(1, rows, config.prefix.width, generator=torch.Generator().manual_seed(seed))


def noise_of(config) -> torch.Tensor:
    return torch.randn(1, config.chunk_size, 32, generator=torch.Generator().manual_seed(9))


def run(model, prefix, context, neurons, **options):
    with torch.inference_mode():
        return model.denoise(model.prefill(prefix, context, **options), noise_of(model.config), neurons)


def nothing() -> None:
    return None


def expand(model, arena, slot, prefix, record, residual):
    config, group = model.config, residual.group_size
    score = ScoreFFN(arena.shape.groups, arena.shape.action_layers, config.expert.mlp, group, 'cpu', nothing)
    run(model, prefix, record, score)
    arena.neurons[slot].copy_(score.ranked(arena.shape.masked))
    run(model, prefix, DenseFFN(), residual)
    arena.slot.fill_(slot)


def test_dense_equals_the_plain_forward_and_leaves_it_usable(parity):
    prefix = prefix_of(parity.config, 0)
    plain = run(parity, prefix, DenseFFN(), DenseFFN())
    packed = PackedVLA(parity)
    torch.testing.assert_close(run(packed, prefix, DenseFFN(), DenseFFN()), plain, atol=1e-5, rtol=0)
    assert torch.equal(run(parity, prefix, DenseFFN(), DenseFFN()), plain)


def test_images_and_prompts_are_embedded_alike(parity):
    size = parity.config.vision.image_size
    images, ids = torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(4)) * 2 - 1, torch.arange(7)
    packed = PackedVLA(parity)
    with torch.inference_mode():
        torch.testing.assert_close(packed.embed_images(images), parity.embed_images(images), atol=1e-5, rtol=1e-5)
        assert torch.equal(packed.embed_prompt(ids), parity.embed_prompt(ids))


def test_weights_are_shared_not_copied(parity):
    packed = PackedVLA(parity)
    for mlp, ffn in ((parity.prefix.layers[1].mlp, packed.prefix_ffns[1]),
                     (parity.expert.layers[2].mlp, packed.expert.ffns[2])):
        assert mlp.up.weight.untyped_storage().data_ptr() == ffn.gate_up.untyped_storage().data_ptr()
    last = packed.expert.ffns[2]
    assert parity.expert.layers[2].mlp.down.weight.untyped_storage().data_ptr() == last.down_t.data_ptr()


def test_padding_influences_nothing(parity):
    packed, prefix = PackedVLA(parity), prefix_of(parity.config, 0)
    n_valid = torch.tensor([prefix.shape[1]], dtype=torch.int32)
    expected = run(packed, prefix, DenseFFN(), DenseFFN())
    for filler in (0.0, 1e4, float('nan')):
        padded = torch.cat([prefix, torch.full((1, 5, prefix.shape[2]), filler)], 1)
        torch.testing.assert_close(run(packed, padded, DenseFFN(), DenseFFN(), n_valid=n_valid), expected, atol=1e-6,
                                   rtol=0)


def test_what_an_earlier_longer_prefix_left_in_the_cache_is_not_seen(parity):
    packed, prefix = PackedVLA(parity), prefix_of(parity.config, 0)
    cache = packed.new_cache(prefix.shape[1] + 4)
    cache.k.fill_(float('nan'))
    cache.v.fill_(float('nan'))
    assert torch.equal(run(packed, prefix, DenseFFN(), DenseFFN(), cache=cache),
                       run(packed, prefix, DenseFFN(), DenseFFN()))


@pytest.mark.parametrize(('sketch', 'residual', 'group'), [
    (0, 'reference', 5), (24, 'anchored', 5), (0, 'anchored', 3), (0, 'anchored', 1), (0, 'none', 5)])
def test_cached_equals_the_plain_caches(parity, sketch, residual, group):
    config, reference, prefix = parity.config, prefix_of(parity.config, 1), prefix_of(parity.config, 2)
    settings = SETTINGS.with_values(sketch_width=sketch, group_size=group)
    arenas = [ReferenceArena(arena_shape(settings, config, 2 * config.vision.tokens), 3, torch.float32, 'cpu')
              for _ in range(2)]
    expand(parity, arenas[0], 2, reference, RecordFFN(arenas[0], 2, nothing),
           ResidualFFN(arenas[0], 2, PLAN.neurons, group, nothing))
    plain = run(parity, prefix, ContextFFN(arenas[0], PLAN.tokens), NeuronFFN(arenas[0], PLAN.neurons, group, residual))
    packed, slot = PackedVLA(parity), torch.tensor([2])
    expand(packed, arenas[1], 2, reference, SlotRecordFFN(arenas[1], slot, nothing),
           SlotResidualFFN(arenas[1], slot, PLAN.neurons, group, nothing))
    for name in ('x', 'y', 'residual'):
        left, right = (getattr(arena, name) for arena in arenas)
        torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-5)
        assert left[2].any() and not right[:2].any()
    chosen = SlotNeuronFFN(arenas[1], PLAN.neurons, config.expert.mlp, group, residual)
    fast = run(packed, prefix, SlotContextFFN(arenas[1], PLAN.tokens), chosen)
    torch.testing.assert_close(fast, plain, atol=1e-5, rtol=0)
    seam = run(packed, prefix, SlotContextFFN(arenas[1], PLAN.tokens), lambda *given: chosen(*given))
    torch.testing.assert_close(seam, plain, atol=1e-5, rtol=0)
    assert not torch.allclose(fast, run(packed, prefix, DenseFFN(), DenseFFN()), atol=1e-4)


def test_ratio_one_is_dense_bit_for_bit(parity):
    packed, config, prefix = PackedVLA(parity), parity.config, prefix_of(parity.config, 2)
    tokens = 2 * config.vision.tokens
    arena = ReferenceArena(arena_shape(SETTINGS, config, tokens), 3, torch.float32, 'cpu')
    every = SlotNeuronFFN(arena, even(config.expert.mlp, 2, config.expert.layers), config.expert.mlp, 5, 'anchored')
    assert torch.equal(run(packed, prefix, SlotContextFFN(arena, tokens), every),
                       run(packed, prefix, DenseFFN(), every))


def test_folded_denoising_equals_the_plain_forward(parity):
    config, neurons = parity.config, parity.config.expert.mlp
    prefix = prefix_of(config, 3)
    plain = run(parity, prefix, DenseFFN(), DenseFFN())
    packed = PackedVLA(parity)
    arena = ReferenceArena(arena_shape(SETTINGS, config, 2 * config.vision.tokens), 1, torch.float32, 'cpu')
    every = SlotNeuronFFN(arena, even(neurons, 2, config.expert.layers), neurons, 5, 'none')
    torch.testing.assert_close(run(packed, prefix, DenseFFN(), every), plain, atol=1e-5, rtol=0)
    seam = run(packed, prefix, DenseFFN(), lambda x, mlp, layer, step: every(x, mlp, layer, step))
    torch.testing.assert_close(seam, plain, atol=1e-5, rtol=0)


def test_pi0_is_refused(parity):
    with pytest.raises(CheckpointError, match='eager engine'):
        PackedVLA(load_model(PARITY.parent / 'tiny_pi0_float32'))
