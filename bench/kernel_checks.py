# SPDX-License-Identifier: Apache-2.0
"""The comparisons of kernel_probe.py: each kernel against its torch reference, at real and at awkward sizes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rmuscle_kernels import geglu, layer_norm, merge, neurons, norms, rope, select
from rmuscle_kernels.tiles import INTERPRETER, Tile


@dataclass(frozen=True)
class Sizes:
    """Letters as in docs/architecture.md."""

    visual: int = 768
    text: int = 64
    prefix_width: int = 2048
    prefix_mlp: int = 16384
    chosen: tuple[int, ...] = (256, 384)  # visual rows recomputed
    suffix: int = 50
    expert_width: int = 1024
    expert_mlp: int = 4096
    chosen_neurons: tuple[int, ...] = (1024, 1408, 2048, 3072)
    heads: int = 8
    head_dim: int = 256
    prefix_layers: int = 4
    expert_layers: int = 18
    repeats: int = 50


REAL = Sizes()
TINY = Sizes(48, 8, 64, 128, (24,), 10, 64, 128, (48,), 2, 32, 2, 2, 1)
GEGLU_TILES = [Tile(128, 128, 64, 8, 3), Tile(64, 128, 64, 4, 4, descriptors=True),
               Tile(64, 256, 64, 8, 3, descriptors=True)]

# largest error over largest value; a product of K terms in bf16 rounds its inputs, its sum is fp32
LIMITS = {torch.bfloat16: 1.5e-2, torch.float16: 3e-3}


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest error relative to the largest expected value."""
    return ((got.float() - expected.float()).abs().max() / expected.float().abs().max()).item()


def run_checks(report, sizes: Sizes, device: torch.device) -> None:
    """Hand each comparison to ``report.check(name, run, limit)``: run() returns an error, at most limit when right."""
    def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return (torch.randn(shape, device=device) * scale).to(dtype)
    for part in (check_select, check_geglu, check_merge, check_neurons, check_small, check_gelu, check_replay):
        part(report, sizes, normal)


def check_select(report, sizes, normal) -> None:
    """Both launches, with well separated changes, and all the same."""
    slots = normal(1).new_tensor([2, 1, 1]).to(torch.int32)  # the one at hand is not the first
    for width in (sizes.prefix_width, 64):
        reference = normal(3, sizes.visual, width)
        factor = 1 + torch.randperm(sizes.visual, device=slots.device)[:, None] / sizes.visual
        x = torch.cat([(reference[1].float() * factor).to(reference.dtype), normal(sizes.text, width)])
        for k in (0, 1, *sizes.chosen, sizes.visual):
            for name, rows in (('distinct', x), ('equal', torch.cat([reference[1], x[sizes.visual:]]))):
                def run(rows=rows, k=k, reference=reference):
                    got = select.select_tokens(rows, reference, slots, k, sizes.text, impl='triton')
                    want = select.select_tokens_reference(rows, reference, slots, k, sizes.text)
                    return float(sum((a != b).sum().item() for a, b in zip(got, want)))
                report.check(f'select {k} of {sizes.visual}, width {width}, {name} changes', run, 0.0)


def check_geglu(report, sizes, normal) -> None:
    """Each tile, gathered and not, full and ragged row counts."""
    rows, width, mlp = sizes.visual + sizes.text, sizes.prefix_width, sizes.prefix_mlp
    tiles = GEGLU_TILES if sizes is REAL else [INTERPRETER.geglu]
    index = torch.randperm(rows, device=normal(1).device).to(torch.int32)
    for dtype in LIMITS:
        x, weight = normal(rows, width, dtype=dtype), normal(2 * mlp, width, scale=width**-0.5, dtype=dtype)
        everything = geglu.gather_geglu_reference(x.float(), weight.float())
        for tile in tiles if dtype == torch.bfloat16 else tiles[:1]:
            for chosen in (None, 1, sizes.chosen[-1] + sizes.text, rows - 3):
                def run(tile=tile, chosen=chosen, x=x, weight=weight, everything=everything):
                    part = None if chosen is None else index[:chosen]
                    want = everything if part is None else everything[part.long()]
                    out = torch.full(want.shape, float('nan'), dtype=x.dtype, device=x.device)
                    return error(geglu.gather_geglu(x, weight, part, out=out, tile=tile, impl='triton'), want)
                report.check(f'geglu {chosen or "all"} of {rows} rows {tile.rows}x{tile.cols}x{tile.depth}'
                             f'{" tma" if tile.descriptors else ""} {dtype}', run, LIMITS[dtype])

        def run_activation(x=x, weight=weight, everything=everything):
            return error(geglu.activate(torch.nn.functional.linear(x, weight), impl='triton'), everything)
        report.check(f'activate {dtype}', run_activation, LIMITS[dtype])


def check_merge(report, sizes, normal) -> None:
    """Bit for bit: a merge is a copy and one rounded addition."""
    rows, width, k = sizes.visual + sizes.text, sizes.prefix_width, sizes.chosen[-1]
    residual, arena, taken = normal(rows, width), normal(2, 3, sizes.visual, width), normal(k + sizes.text, width)
    slot = torch.ones(1, dtype=torch.int32, device=residual.device)
    _, inverse = select.select_tokens_reference(residual, arena[:, 1], slot, k, sizes.text)
    for base in (residual, None):
        def run(base=base):
            got = merge.merge_rows(base, taken, inverse, arena[:, 1], impl='triton')
            return float((got != merge.merge_rows_reference(base, taken, inverse, arena[:, 1])).sum().item())
        report.check(f'merge {rows} rows{"" if base is None else " onto the residual"}', run, 0.0)


def check_neurons(report, sizes, normal) -> None:
    """Row and neuron tails, the dense form, and that a result never depends on which program came last."""
    width, mlp = sizes.expert_width, sizes.expert_mlp
    for dtype in LIMITS:
        for rows in (sizes.suffix, sizes.suffix + 1, 7, 130):
            x, residual = normal(rows, width, dtype=dtype), normal(2, rows, width, dtype=dtype)
            gate_up = normal(mlp, 2, width, scale=width**-0.5, dtype=dtype)
            down = normal(mlp, width, scale=mlp**-0.5, dtype=dtype)
            ranked = torch.stack([torch.randperm(mlp, device=x.device) for _ in range(2)]).to(torch.int32)
            slot = torch.ones(1, dtype=torch.int32, device=x.device)
            for n in (None, 1, 100, *sizes.chosen_neurons, mlp):
                if n is not None and n > mlp:
                    continue
                given = (None, None, None, None) if n is None else (ranked, slot, n, residual)

                def run(x=x, gate_up=gate_up, down=down, given=given):
                    remembered = None if given[3] is None else given[3].float()
                    wide = (x.float(), gate_up.float(), down.float())
                    want = neurons.neuron_ffn_reference(*wide, *given[:3], remembered)
                    out = torch.full_like(x, float('nan'))
                    return error(neurons.neuron_ffn(x, gate_up, down, *given, out=out, impl='triton'), want)
                report.check(f'neuron_ffn {rows} rows, {n or "all"} neurons {dtype}', run, LIMITS[dtype])

    def repeat():
        work = neurons.neuron_workspace(rows, width, mlp, x.dtype, x.device)
        runs = [neurons.neuron_ffn(x, gate_up, down, ranked, slot, mlp // 2, residual, workspace=work, impl='triton')
                for _ in range(3 if x.device.type == 'cpu' else 300)]
        return float(sum((again != runs[0]).any() for again in runs))
    report.check('neuron_ffn repeats bit for bit', repeat, 0.0)


def check_small(report, sizes, normal) -> None:
    """Norms and RoPE."""
    for rows, width in ((sizes.visual + sizes.text, sizes.prefix_width), (sizes.suffix, sizes.expert_width), (3, 100)):
        x, delta = normal(rows, width), normal(rows, width)
        scale, shift, gate = (normal(width, dtype=torch.float32) for _ in range(3))

        def run_norm(x=x, delta=delta, scale=scale, shift=shift, gate=gate):
            pairs = zip(norms.gated_add_ada_rms_norm(x, delta, gate, scale, shift, impl='triton'),
                        norms.norm_reference(x, scale, shift, delta, gate))
            plain = error(norms.rms_norm(x, scale, impl='triton'), norms.norm_reference(x, scale)[1])
            return max(plain, *(error(got, want) for got, want in pairs))
        report.check(f'norms {rows}x{width}', run_norm, LIMITS[torch.bfloat16])

        def run_layer_norm(x=x, delta=delta, vectors=(scale, shift, gate)):
            pairs = zip(layer_norm.add_layer_norm(x, delta, *vectors, impl='triton'),
                        layer_norm.add_layer_norm_reference(x, delta, *vectors))
            return max(error(got, want) for got, want in pairs)
        report.check(f'layer norm {rows}x{width}', run_layer_norm, LIMITS[torch.bfloat16])
        qkv = normal(rows, (sizes.heads + 2) * sizes.head_dim)
        angle = torch.rand(rows, sizes.head_dim // 2, device=x.device) * 100

        def run_rope(qkv=qkv, angle=angle):
            pairs = zip(rope.rope(qkv, angle.cos(), angle.sin(), sizes.heads, impl='triton'),
                        rope.rope_reference(qkv, angle.cos(), angle.sin(), sizes.heads))
            return max(error(got, want) for got, want in pairs)
        report.check(f'rope {rows} rows', run_rope, LIMITS[torch.bfloat16])


def check_gelu(report, sizes, normal) -> None:
    """cuBLASLt's epilogue is nearer to the tanh form than to the exact one; the vision tower relies on that."""
    x = normal(256, 64, scale=2.0, dtype=torch.float16)
    if x.device.type == 'cpu':
        return
    linear = torch.eye(64, dtype=x.dtype, device=x.device)

    def run():
        got = torch._addmm_activation(x.new_zeros(64), x, linear, use_gelu=True).float()
        forms = (torch.nn.functional.gelu(x.float(), approximate=form) for form in ('tanh', 'none'))
        tanh, exact = ((got - form).abs().sum().item() for form in forms)
        return tanh / exact
    report.check('gelu in the epilogue is the tanh form', run, 0.9)


def check_replay(report, sizes, normal) -> None:
    """One captured graph serves both slots, and its replays leave nothing behind."""
    rows, width, k = sizes.visual + sizes.text, sizes.prefix_width, sizes.chosen[-1]
    x, reference, remembered = normal(rows, width), normal(2, sizes.visual, width), normal(2, sizes.visual, width)
    weight, down = normal(512, width, scale=width**-0.5), normal(width, 256, scale=256**-0.5)
    slot = torch.zeros(1, dtype=torch.int32, device=x.device)

    def layer(impl):
        index, inverse = select.select_tokens(x, reference, slot, k, sizes.text, impl=impl)
        h = geglu.gather_geglu(x, weight, index, impl=impl)
        y = merge.merge_rows(x, h @ down.t(), inverse, remembered, impl=impl)
        return neurons.neuron_ffn(y[:sizes.suffix], expert[0], expert[1], ranked, slot, n, impl=impl)
    expert = normal(sizes.expert_mlp, 2, width, scale=width**-0.5), normal(sizes.expert_mlp, width, scale=0.02)
    n = sizes.chosen_neurons[0]
    ranked = torch.stack([torch.randperm(sizes.expert_mlp, device=x.device) for _ in range(2)]).to(torch.int32)

    def run():
        if x.device.type == 'cpu':
            return max(_slot_error(slot, s, lambda: layer('triton'), lambda: layer('reference')) for s in (1, 0))
        layer('triton')
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer('triton')

        def replay():
            graph.replay()
            return out
        return max(_slot_error(slot, s, replay, lambda: layer('reference')) for s in (1, 0, 1))
    report.check('captured layer follows the slot', run, 2e-2)


def _slot_error(slot, value, run, expected) -> float:
    slot.fill_(value)
    return error(run(), expected())
