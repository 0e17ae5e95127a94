# SPDX-License-Identifier: Apache-2.0
"""The expert layer for the probe scripts: plain and folded against double precision, and tiles tried inside the chain.

A tile that wins alone may lose between its neighbours, so each candidate is timed in a graph of 18 whole layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from kernel_checks import LIMITS, REAL, Sizes, error

from rmuscle_kernels import geglu, layer, neurons, norms, rope, runtime, step
from rmuscle_kernels.attention import attend
from rmuscle_kernels.tiles import INTERPRETER, Tile, Tiles, tiles_for

QKV_TILES = [Tile(64, 16, 256, 4, 3), Tile(64, 16, 256, 4, 4), Tile(64, 8, 256, 4, 3), Tile(64, 16, 128, 4, 4),
             Tile(64, 16, 128, 4, 6), Tile(64, 32, 128, 4, 4)]
GATE_UP_TILES = [Tile(64, 16, 256, 4, 3), Tile(64, 16, 256, 4, 4), Tile(64, 16, 128, 4, 4), Tile(64, 16, 128, 4, 6),
                 Tile(64, 16, 512, 4, 2), Tile(64, 32, 128, 4, 4), Tile(64, 32, 256, 4, 3)]
WIDE_TILES = [Tile(64, 32, 128, 4, 3), Tile(64, 32, 128, 4, 4), Tile(64, 32, 256, 4, 3), Tile(64, 16, 128, 4, 3),
              Tile(64, 16, 128, 4, 4)]
DOWN_TILES = [Tile(64, 32, 128, 4, 3, splits=4), Tile(64, 32, 128, 4, 4, splits=4), Tile(64, 32, 256, 4, 3, splits=4),
              Tile(64, 64, 128, 4, 3, splits=8), Tile(64, 64, 128, 8, 3, splits=8), Tile(64, 64, 256, 4, 2, splits=8),
              Tile(64, 64, 128, 4, 3, splits=4)]


class Chain:
    """Weights of some expert layers, and both ways to run them."""

    def __init__(self, sizes: Sizes, device: torch.device, layers: int) -> None:
        def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return (torch.randn(shape, device=device) * scale).to(dtype)

        self.sizes, self.layers, self.device = sizes, range(layers), device
        width, mlp, size, rows = sizes.expert_width, sizes.expert_mlp, sizes.head_dim, sizes.suffix
        inner = sizes.heads * size
        self.qkv = [normal(inner + 2 * size, width, scale=width**-0.5) for _ in self.layers]
        self.out_t = [normal(inner, width, scale=inner**-0.5) for _ in self.layers]
        self.gate_up = [normal(mlp, 2, width, scale=width**-0.5) for _ in self.layers]
        self.down_t = [normal(mlp, width, scale=mlp**-0.5) for _ in self.layers]
        # the layouts of plain matmuls
        self.out = [weight.t().contiguous() for weight in self.out_t]
        self.plain = [(weight.transpose(0, 1).flatten(0, 1).contiguous(), down.t().contiguous())
                      for weight, down in zip(self.gate_up, self.down_t)]
        self.vectors = [[normal(width, scale=0.3, dtype=torch.float32) for _ in range(3)]  # scale, shift, gate
                        for _ in range(2 * layers + 1)]
        self.offsets = [(self.vectors[2 * i][1] @ self.qkv[i].float().t(),
                         (self.gate_up[i].float() @ self.vectors[2 * i + 1][1]).contiguous()) for i in self.layers]
        keys = sizes.visual + sizes.text + rows
        self.k, self.v = ([normal(keys, size) for _ in self.layers] for _ in 'kv')
        angle = torch.rand(rows, size // 2, device=device)
        self.cos, self.sin = angle.cos(), angle.sin()
        self.kv_len = torch.tensor([keys], dtype=torch.int32, device=device)
        self.ranked = torch.stack([torch.stack([torch.randperm(mlp) for _ in self.layers]) for _ in range(2)])
        self.ranked, self.slot = self.ranked.to(torch.int32).to(device), torch.ones_like(self.kv_len)
        self.residual = normal(2, layers, rows, width, scale=0.1)
        self.attended = normal(-(-rows // 64) * 64, inner)
        self.x = normal(rows, width)
        self.first = layer.make_stream(self.x, self.vectors[0][0])
        self.workspaces: dict[Tiles, neurons.NeuronWorkspace] = {}

    def folded(self, n: int | None, tiles: Tiles, impl: str | None = 'triton') -> torch.Tensor:
        """Few launches: layer.py. Returns the stream, [H, W]."""
        stream, rows = self.first, self.x.shape[0]
        if tiles not in self.workspaces:
            self.workspaces[tiles] = neurons.neuron_workspace(*self.x.shape, self.sizes.expert_mlp, self.x.dtype,
                                                              self.device, tiles=tiles)
        work = self.workspaces[tiles]
        for i in self.layers:
            (_, _, gate), (scale, _, ffn_gate), (following, _, _) = self.vectors[2 * i:2 * i + 3]
            q = layer.norm_qkv_rope(stream, self.offsets[i][0], self.qkv[i], self.cos, self.sin, self.sizes.heads,
                                    self.k[i], self.v[i], tiles=tiles, impl=impl)
            attend(q, self.k[i], self.v[i], self.kv_len, out=self.attended[:rows], impl=impl)
            stream = layer.add_project(stream, self.attended, self.out_t[i], gate, scale, work, tiles=tiles, impl=impl)
            stream = layer.add_neuron_ffn(stream, self.gate_up[i], self.down_t[i], self.offsets[i][1], ffn_gate,
                                          following, work, *self._choice(i, n), tiles=tiles, impl=impl)
        return stream.x

    def separate(self, n: int | None, impl: str | None = 'triton') -> torch.Tensor:
        """Matmuls, norms and rotations of their own; a dense FFN by cuBLAS. Returns the stream."""
        x, (scale, shift, gate) = self.x, self.vectors[0]
        h = norms.ada_rms_norm(x, scale, shift, impl=impl)
        for i in self.layers:
            q, _, _ = rope.rope(F.linear(h, self.qkv[i]), self.cos, self.sin, self.sizes.heads,
                                cache=(self.k[i], self.v[i]), impl=impl)
            y = F.linear(attend(q, self.k[i], self.v[i], self.kv_len, impl=impl), self.out[i])
            scale, shift, ffn_gate = self.vectors[2 * i + 1]
            x, h = norms.gated_add_ada_rms_norm(x, y, gate, scale, shift, impl=impl)
            if n is None:
                up, down = self.plain[i]
                y = F.linear(geglu.activate(F.linear(h, up), impl=impl), down)
            else:
                y = neurons.neuron_ffn(h, self.gate_up[i], self.down_t[i], *self._choice(i, n), impl=impl)
            scale, shift, gate = self.vectors[2 * i + 2]
            x, h = norms.gated_add_ada_rms_norm(x, y, ffn_gate, scale, shift, impl=impl)
        return x

    def _choice(self, i: int, n: int | None) -> tuple:
        return (None,) * 4 if n is None else (self.ranked[:, i], self.slot, n, self.residual[:, i])

    def exact(self, n: int | None) -> torch.Tensor:
        """The same layers in float64, by torch alone."""
        def normed(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + neurons.EPS) * (1 + scale) + shift

        x, heads = self.x.double(), self.sizes.heads
        vectors = [[vector.double() for vector in three] for three in self.vectors]
        for i in self.layers:
            (scale, shift, gate), (ffn_scale, ffn_shift, ffn_gate) = vectors[2 * i:2 * i + 2]
            packed = (normed(x, scale, shift) @ self.qkv[i].double().t()).unflatten(1, (heads + 2, -1))
            a, b = packed[:, :heads + 1].chunk(2, -1)
            c, s = self.cos.double()[:, None], self.sin.double()[:, None]
            turned = torch.cat((a * c - b * s, b * c + a * s), -1)
            rows = x.shape[0]
            k = torch.cat((turned[:, heads], self.k[i][rows:].double()))
            v = torch.cat((packed[:, heads + 1], self.v[i][rows:].double()))
            weight = (turned[:, :heads].flatten(0, 1) @ k.t() * k.shape[1]**-0.5).softmax(-1)
            x = x + gate * ((weight @ v).view(rows, -1) @ self.out_t[i].double())
            chosen, slot, _, residual = self._choice(i, n)
            chosen = None if n is None else chosen[:, :n]
            y = neurons.neuron_ffn_reference(normed(x, ffn_scale, ffn_shift), self.gate_up[i].double(),
                                             self.down_t[i].double(), chosen, slot, n,
                                             None if residual is None else residual.double())
            x = x + ffn_gate * y
        return x


def layer_checks(report, sizes: Sizes, device: torch.device) -> None:
    """Two layers both ways, and the launch between two denoise steps."""
    chain, base = Chain(sizes, device, 2), INTERPRETER if device.type == 'cpu' else tiles_for(device)
    truths = {n: chain.exact(n) for n in {None, sizes.chosen_neurons[0], _some(sizes)}}

    def check(name: str, n: int | None, run: Callable[[], torch.Tensor]) -> None:
        report.check(f'expert layers {name}, {n or "all"} neurons', lambda: error(run(), truths[n]),
                     LIMITS[torch.bfloat16])

    for n in truths:
        check('separate', n, lambda n=n: chain.separate(n))
        check('folded', n, lambda n=n: chain.folded(n, base))
    report.check('denoise step', lambda: _step_error(sizes, device), LIMITS[torch.bfloat16])


def _step_error(sizes: Sizes, device: torch.device) -> float:
    actions, stream, linears = _step_operands(sizes, device)
    mine, reference = ([part.clone() for part in (actions, stream)] for _ in range(2))
    for operands, impl in ((mine, 'triton'), (reference, 'reference')):
        step.denoise_step(*operands, 0.1, **linears, impl=impl)
    return max(error(got, want) for got, want in zip(mine, reference))


def _step_operands(sizes: Sizes, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, dict[str, tuple]]:
    width, count = max(sizes.expert_width, step.CHUNK), 32

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device) * shape[-1]**-0.5
    return (normal(sizes.suffix, count), normal(sizes.suffix, width).bfloat16(),
            {'norm': (normal(width), normal(width)), 'action_out': (normal(count, width), normal(count)),
             'action_in': (normal(width, count), normal(width))})


def _some(sizes: Sizes) -> int:
    """Neurons evaluated in profile "default"."""
    return 2048 if sizes is REAL else sizes.chosen_neurons[0]


def _candidates(sizes: Sizes, base: Tiles) -> list[tuple[str, list[Tile], int | None]]:
    """Field of Tiles, tiles to try for it, and with how many neurons."""
    if sizes is not REAL:
        return [(field, [getattr(base, field)], _some(sizes)) for field in ('qkv', 'out')]
    return [('qkv', QKV_TILES, 2048), ('out', DOWN_TILES, 2048), ('neuron_gate_up', GATE_UP_TILES, 2048),
            ('neuron_down', DOWN_TILES, 2048), ('neuron_gate_up_wide', WIDE_TILES, None)]


def _named(tile: Tile) -> str:
    splits = f' split{tile.splits}' if tile.splits > 1 else ''
    return f'{tile.rows}x{tile.cols}x{tile.depth} w{tile.warps} s{tile.stages}{splits}'


def layer_times(report, sizes: Sizes, device: torch.device) -> None:
    """Per layer: both ways, with and without early launch; then tile by tile, in the better of those.

    A tile whose result is not that of the checked tiles, up to the rounding of all layers, counts as failed.
    """
    layers, cuda, n = sizes.expert_layers, device.type == 'cuda', _some(sizes)
    chain, best = Chain(sizes, device, layers), tiles_for(device) if cuda else INTERPRETER
    weights = 2.0 * (chain.qkv[0].numel() + chain.out_t[0].numel())

    def span(name: str, count: int | None, run: Callable[[], object]) -> float:
        moved = weights + 6.0 * (count or sizes.expert_mlp) * sizes.expert_width
        return report.time(f'expert layer, {count or "all"} neurons: {name}', [run], sizes, bytes_=moved, per=layers)

    def trial(tiles: Tiles, count: int | None) -> torch.Tensor:
        result = chain.folded(count, tiles)
        if not cuda or torch.cuda.is_current_stream_capturing():
            return result
        if not (difference := error(result, expected[count])) < 5e-2:
            raise ValueError(f'differs by {difference:.1e}')
        return result

    counts = dict.fromkeys((None, n, sizes.chosen_neurons[0]))
    spans, expected = {}, {count: chain.folded(count, best) for count in counts} if cuda else {}
    try:
        for early in (False, True) if cuda else (False,):
            runtime.EARLY_LAUNCH, label = early, ' early' if early else ''
            for count in counts:
                span(f'separate{label}', count, lambda c=count: chain.separate(c))
                spans[early, count] = span(f'folded{label}', count, lambda c=count: trial(best, c))
        runtime.EARLY_LAUNCH = cuda and spans[True, n] < spans[False, n]
        for field, options, count in _candidates(sizes, best):
            trials = {tile: replace(best, **{field: tile}) for tile in options}
            timed = {tile: span(f'{field} {_named(tile)}', count, lambda t=tiles, c=count: trial(t, c))
                     for tile, tiles in trials.items()}
            best = trials[min(timed, key=timed.get)]
        for count in (None, n):
            span('folded, best tiles', count, lambda c=count: trial(best, c))
        actions, stream, linears = _step_operands(sizes, device)
        report.time('between denoise steps', [lambda: step.denoise_step(actions, stream, 0.1, **linears, impl='triton')]
                    * 10, sizes)
    finally:
        runtime.EARLY_LAUNCH = False
