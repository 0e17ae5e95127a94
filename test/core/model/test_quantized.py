# SPDX-License-Identifier: Apache-2.0
"""8-bit FFN weights: what they cost in accuracy, what they save, and that a subset of neurons is what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rmuscle_core.errors import CheckpointError, SettingsError
from rmuscle_core.model import TransformerConfig, checkpoint, load_config, load_model
from rmuscle_core.model.gemma import GeGLU
from rmuscle_core.model.quantized import QuantizedGeGLU, quantize_ffns

POLICY = Path(__file__).parents[3] / 'config' / 'policy' / 'transfer_cube'
LINEAR, FFN = 0.03, 0.05  # of the output; rounding to three mantissa bits costs 2.6 %, three matrices root 3 as much


def nbytes(module: torch.nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def layer(width: int, neurons: int, dtype: torch.dtype = torch.float32) -> GeGLU:
    torch.manual_seed(0)
    made = GeGLU(TransformerConfig(width, 1, neurons), dtype).eval().requires_grad_(False)
    for linear in (made.gate, made.up, made.down):
        torch.nn.init.normal_(linear.weight, std=linear.in_features ** -0.5)
    return made


def rows(width: int) -> torch.Tensor:
    return torch.randn(40, width, generator=torch.Generator().manual_seed(1))


def error(exact: torch.nn.Module, narrow: torch.nn.Module, width: int) -> float:
    x = rows(width)
    return float((narrow(x) - exact(x)).norm() / exact(x).norm())


def check_errors(exact: GeGLU, narrow: QuantizedGeGLU) -> None:
    for name in ('gate', 'up', 'down'):
        linear = getattr(exact, name)
        assert 0.01 < error(linear, getattr(narrow, name), linear.in_features) < LINEAR, name
    assert 0.01 < error(exact, narrow, exact.gate.in_features) < FFN


def test_random_weights_lose_what_the_format_costs():
    exact = layer(256, 1024)
    check_errors(exact, QuantizedGeGLU(exact))


def test_the_shipped_policy_loses_what_the_format_costs():
    exact, narrow = load_model(POLICY), load_model(POLICY, weight_dtype='fp8')
    pairs = [(a, b) for part in ('prefix', 'expert')
             for a, b in zip(getattr(exact, part).layers, getattr(narrow, part).layers) if hasattr(a, 'mlp')]
    assert len(pairs) == exact.config.prefix.layers - 1 + exact.config.expert.layers
    with torch.inference_mode():
        for a, b in pairs:
            check_errors(a.mlp, b.mlp)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_the_forward_is_that_of_the_weights_it_stands_for(dtype):
    exact = layer(64, 96)
    narrow, widened = QuantizedGeGLU(exact), layer(64, 96)
    for name in ('gate', 'up', 'down'):
        getattr(widened, name).weight.copy_(getattr(narrow, name).weight)
    y, expected = narrow(rows(64).to(dtype)), widened(rows(64))
    assert y.dtype == dtype
    assert (y.float() - expected).norm() < (1e-6 if dtype == torch.float32 else 0.01) * expected.norm()


def test_weights_take_half_the_bytes_of_bfloat16():
    exact = layer(512, 1024, torch.bfloat16)
    narrow = QuantizedGeGLU(exact)
    assert nbytes(narrow) == nbytes(exact) / 2 + 3 * 1024 * 4  # and a scale per neuron and matrix
    assert nbytes(narrow) < 0.51 * nbytes(exact)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_gathered_weights_are_those_of_the_chosen_neurons(dtype):
    narrow, index = QuantizedGeGLU(layer(32, 48)), torch.tensor([3, 4, 17, 40], dtype=torch.int32)
    gate, up, down = (torch.empty(shape, dtype=dtype) for shape in ((4, 32), (4, 32), (32, 4)))
    narrow.gather(index, gate, up, down)
    assert torch.equal(gate, narrow.gate.weight[index.long()].to(dtype))
    assert torch.equal(up, narrow.up.weight[index.long()].to(dtype))
    assert torch.equal(down, narrow.down.weight[:, index.long()].to(dtype))


def test_a_weight_that_is_not_finite_is_refused_by_layer(random_model):
    random_model.requires_grad_(False)
    random_model.expert.layers[1].mlp.up.weight[2, 3] = float('inf')
    with pytest.raises(CheckpointError, match=r'expert layer 1.*output channel 2'):
        quantize_ffns(random_model)


@pytest.mark.parametrize(('capability', 'fits'), [((8, 6), False), ((8, 9), True), ((11, 0), True)])
def test_a_gpu_without_the_format_is_refused_before_anything_is_read(monkeypatch, tmp_path, capability, fits):
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 1)
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device: capability)
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda device: 'NVIDIA Example')
    monkeypatch.setattr(checkpoint, 'load_config', lambda directory: load_config(POLICY))
    monkeypatch.setattr(checkpoint, '_check_memory', stop)
    with pytest.raises(Stop if fits else SettingsError) as refusal:
        load_model(tmp_path, device='cuda:0', weight_dtype='fp8')
    assert fits or 'NVIDIA Example has 8.6; set it to checkpoint' in str(refusal.value)


class Stop(Exception):
    """Reached only by what was not refused."""


def stop(*_):
    raise Stop
