# SPDX-License-Identifier: Apache-2.0
"""The folded launches of an expert layer against norm, product, rotation, gate and add done one after another."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from rmuscle_kernels.layer import add_neuron_ffn, add_project, make_stream, norm_qkv_rope
from rmuscle_kernels.neurons import EPS, neuron_workspace, pack_neurons
from rmuscle_kernels.tiles import INTERPRETER

WIDTH, HEADS, SIZE, NEURONS = 64, 2, 64, 96
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2}
CASES = [(impl, dtype) for impl in ('triton', 'reference') for dtype in TOLERANCE]


def vectors(random):
    """scale, shift and gate of an adaptive norm, and a stream that is far from normalised."""
    return tuple(random(WIDTH, dtype=torch.float32) for _ in range(3))


def norm(x, scale, shift):
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * (1 + scale.double()) + shift.double()


def assert_near(got, expected, dtype):
    error = (got.double() - expected).abs().max() / expected.abs().max()
    assert error < TOLERANCE[dtype], f'relative error {error:.2e}'


def assert_stream(got, expected, scale, dtype):
    assert_near(got.x, expected, dtype)
    assert_near(got.scaled, expected * (1 + scale.double()), dtype)
    assert_near(got.squares.sum(0), got.x.double().square().sum(-1), torch.float32)


@pytest.mark.parametrize('impl, dtype', CASES)
@pytest.mark.parametrize('rows', [5, 32, 37])
def test_norm_qkv_rope(random, device, impl, dtype, rows):
    scale, shift, _ = vectors(random)
    x = random(rows, WIDTH, scale=30.0, dtype=dtype)
    weight = random((HEADS + 2) * SIZE, WIDTH, scale=WIDTH**-0.5, dtype=dtype)
    angle = torch.rand(rows, SIZE // 2, device=device)
    k, v = (torch.full((rows + 3, SIZE), float('nan'), dtype=dtype, device=device) for _ in 'kv')
    q = norm_qkv_rope(make_stream(x, scale), shift @ weight.float().t(), weight, angle.cos(), angle.sin(), HEADS, k, v,
                      tiles=INTERPRETER, impl=impl)
    packed = (norm(x, scale, shift) @ weight.double().t()).unflatten(1, (HEADS + 2, SIZE))
    first, second = packed[:, :HEADS + 1].chunk(2, -1)
    c, s = angle.cos()[:, None].double(), angle.sin()[:, None].double()
    turned = torch.cat([first * c - second * s, second * c + first * s], -1)
    assert_near(q, turned[:, :HEADS], dtype)
    assert_near(k[:rows], turned[:, HEADS], dtype)
    assert_near(v[:rows], packed[:, HEADS + 1], dtype)
    assert k[rows:].isnan().all() and v[rows:].isnan().all()


@pytest.mark.parametrize('impl, dtype', CASES)
@pytest.mark.parametrize('rows', [5, 37])
def test_add_project(random, device, impl, dtype, rows):
    scale, following, gate = vectors(random)
    work = neuron_workspace(rows, WIDTH, 128, dtype, device, tiles=INTERPRETER)
    x, weight_t = random(rows, WIDTH, dtype=dtype), random(128, WIDTH, scale=0.1, dtype=dtype)
    y = torch.full((64, 128), float('nan'), dtype=dtype, device=device)
    y[:rows] = random(rows, 128, dtype=dtype)
    got = add_project(make_stream(x, scale), y, weight_t, gate, following, work, tiles=INTERPRETER, impl=impl)
    assert_stream(got, x.double() + y[:rows].double() @ weight_t.double() * gate.double(), following, dtype)
    assert not work.arrived.any()


@pytest.mark.parametrize('impl, dtype', CASES)
@pytest.mark.parametrize('rows, n, with_residual', [(5, 40, True), (37, 64, False), (5, None, False), (5, 0, True)])
def test_add_neuron_ffn(random, device, slot, impl, dtype, rows, n, with_residual):
    scale, shift, gate = vectors(random)
    following = random(WIDTH, dtype=torch.float32)
    x = random(rows, WIDTH, scale=30.0, dtype=dtype)
    weights = (random(NEURONS, WIDTH, scale=WIDTH**-0.5, dtype=dtype), random(NEURONS, WIDTH, scale=0.1, dtype=dtype),
               random(WIDTH, NEURONS, scale=0.1, dtype=dtype))
    gate_up, down_t = pack_neurons(*weights)
    offset = torch.einsum('w,ncw->nc', shift, gate_up.float())
    ranked = torch.stack([torch.randperm(NEURONS)[:80] for _ in range(2)]).to(torch.int32).to(device)
    residual = random(2, rows, WIDTH, dtype=dtype) if with_residual else None
    work = neuron_workspace(rows, WIDTH, NEURONS, dtype, device, tiles=INTERPRETER)
    chosen = {} if n is None else {'neurons': ranked, 'slot': slot, 'n': n}
    got = add_neuron_ffn(make_stream(x, scale), gate_up, down_t, offset.contiguous(), gate, following, work,
                         residual=residual, tiles=INTERPRETER, impl=impl, **chosen)
    kept = slice(None) if n is None else ranked[int(slot), :n].long()
    first, second, down = (w.double() for w in weights)
    h = norm(x, scale, shift)
    hidden = F.gelu(h @ first[kept].t(), approximate='tanh') * (h @ second[kept].t())
    if n != 0:
        assert_near(work.hidden[:rows, :hidden.shape[1]], hidden, dtype)
    y = hidden @ down[:, kept].t()
    y = y if residual is None else y + residual[int(slot)].double()
    assert_stream(got, x.double() + y * gate.double(), following, dtype)


@pytest.mark.parametrize('change, words', [({'weight': torch.zeros(256, 128)[:, ::2]}, 'weight must be contiguous'),
                                           ({'offset': torch.zeros(5)}, 'offset must have shape')])
def test_refuses_what_does_not_fit(change, words):
    operands = {'stream': make_stream(torch.zeros(5, WIDTH), torch.zeros(WIDTH)), 'offset': torch.zeros(256),
                'weight': torch.zeros(256, WIDTH), 'cos': torch.zeros(5, 32), 'sin': torch.zeros(5, 32), 'heads': 2,
                'k': torch.zeros(5, 64), 'v': torch.zeros(5, 64), **change}
    with pytest.raises(ValueError, match=words):
        norm_qkv_rope(**operands)
