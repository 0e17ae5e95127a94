#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402 - what triton reads at import is set before it is imported
"""Check every kernel against its torch reference on this GPU, then time tiles and their rivals: what to run first.

    python3 bench/kernel_probe.py probe.json             # about a minute on a GPU
    python3 bench/kernel_probe.py probe.json --dry-run   # tiny sizes in Triton's interpreter, no GPU

Times are medians over replays of one CUDA graph that calls a kernel once per layer, each layer with weights of its own
(together larger than the L2 cache), divided by the layers. Nothing has to be installed beside torch and triton.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

DRY_RUN = '--dry-run' in sys.argv
if DRY_RUN:
    os.environ['TRITON_INTERPRET'] = '1'  # read when triton is first imported
if importlib.util.find_spec('rmuscle_kernels') is None:
    _alias = tempfile.TemporaryDirectory()  # removed when the process ends
    Path(_alias.name, 'rmuscle_kernels').symlink_to(Path(__file__).resolve().parent.parent / 'kernels')
    sys.path.insert(0, _alias.name)

import torch
import torch.nn.functional as F
import triton
from kernel_checks import GEGLU_TILES, REAL, TINY, Sizes, run_checks
from layer_probe import layer_checks, layer_times

from rmuscle_kernels import geglu, layer_norm, merge, neurons, norms, rope, select
from rmuscle_kernels.tiles import INTERPRETER, Tile, tiles_for

DEVICE = torch.device('cpu' if DRY_RUN else 'cuda')


def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return random values on the device."""
    return (torch.randn(shape, device=DEVICE) * scale).to(dtype)


def int32(values: list[int] | torch.Tensor) -> torch.Tensor:
    """Return an index tensor on the device."""
    return torch.as_tensor(values).to(torch.int32).to(DEVICE)


def microseconds(calls: list[Callable[[], object]], repeats: int) -> float:
    """Median time of one call, from replays of a CUDA graph that holds all of them."""
    if DRY_RUN:
        start = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - start) / len(calls) * 1e6
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:  # compiles before the capture
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(3):
        graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    spans = sorted(first.elapsed_time(second) for first, second in pairwise(events))
    return spans[repeats // 2] / len(calls) * 1e3


class Report:
    """Rows printed as they come and written as JSON after each, so that a crash loses nothing."""

    def __init__(self, path: str):
        self.path, self.start = Path(path), time.perf_counter()
        machine = 'interpreter' if DRY_RUN else torch.cuda.get_device_name()
        self.data: dict = {'device': machine, 'torch': torch.__version__, 'triton': triton.__version__, 'checks': [],
                           'times': []}

    def check(self, name: str, run: Callable[[], float], limit: float) -> bool:
        """Run a comparison that returns an error; a failure is a row, not the end."""
        try:
            value, note = run(), ''
        except Exception as failure:  # noqa: BLE001 - the other kernels are still worth checking
            value, note = float('nan'), f'{type(failure).__name__}: {" ".join(str(failure).split())[:300]}'
        passed = value <= limit
        self._add('checks', {'name': name, 'error': value, 'limit': limit, 'passed': passed, 'note': note},
                  f'{"ok  " if passed else "FAIL"} {name:58s} {value:9.2e} (limit {limit:.0e}) {note}')
        return passed

    def time(self, name: str, calls: list[Callable[[], object]], sizes: Sizes, *, flops: float = 0.0,
             bytes_: float = 0.0, per: int = 1) -> float:
        """Time calls, each of ``per`` equal parts; infinity when they fail."""
        try:
            span, note = microseconds(calls, sizes.repeats) / per, ''
        except Exception as failure:  # noqa: BLE001 - a tile may not fit this GPU; the others may
            span, note = float('inf'), f'{type(failure).__name__}: {" ".join(str(failure).split())[:200]}'
        row = {'name': name, 'us': span, 'tflops': flops / span / 1e6, 'tbs': bytes_ / span / 1e6, 'note': note}
        rate = f'{row["tflops"]:7.0f} TFLOP/s' if flops else f'{row["tbs"]:7.2f} TB/s   '
        self._add('times', row, f'{span:9.2f} us {rate} {name} {note}')
        return span

    def _add(self, kind: str, row: dict, line: str) -> None:
        self.data[kind].append(row)
        self.data['seconds'] = time.perf_counter() - self.start
        self.path.write_text(json.dumps(self.data, indent=1))
        print(line, flush=True)


def named(tile: Tile) -> str:
    """Return a short name of a tile."""
    return (f'{tile.rows}x{tile.cols}x{tile.depth} w{tile.warps} s{tile.stages}'
            + (f' split{tile.splits}' if tile.splits > 1 else '') + (' tma' if tile.descriptors else ''))


def geglu_times(report: Report, sizes: Sizes, chosen: int | None, x: torch.Tensor, weights: list[torch.Tensor],
                downs: list[torch.Tensor]) -> None:
    """The two halves of the prefix FFN on chosen rows, or on all."""
    rows, mlp, index = x.shape[0], sizes.prefix_mlp, None
    if chosen is not None:
        visual = torch.randperm(sizes.visual)[:chosen].sort().values
        index = int32(torch.cat([visual, torch.arange(sizes.visual, rows)]))
    taken = rows if chosen is None else chosen + sizes.text
    label, flops = f'{taken} of {rows} rows', 4.0 * taken * mlp * sizes.prefix_width
    hiddens = [normal(taken, mlp) for _ in weights]

    def product(weight: torch.Tensor) -> torch.Tensor:
        return F.linear(x if index is None else x.index_select(0, index), weight)
    report.time(f'geglu {label}: cuBLAS, torch activation',
                [lambda w=w: geglu.gather_geglu_reference(x, w, index) for w in weights], sizes, flops=flops)
    report.time(f'geglu {label}: cuBLAS, activation kernel',
                [lambda w=w, h=h: geglu.activate(product(w), out=h, impl='triton')
                 for w, h in zip(weights, hiddens)], sizes, flops=flops)
    report.time(f'geglu {label}: cuBLAS product alone', [lambda w=w: product(w) for w in weights], sizes, flops=flops)
    for tile in [INTERPRETER.geglu] if DRY_RUN else GEGLU_TILES:
        report.time(f'geglu {label}: fused {named(tile)}',
                    [lambda w=w, h=h, t=tile: geglu.gather_geglu(x, w, index, out=h, tile=t, impl='triton')
                     for w, h in zip(weights, hiddens)], sizes, flops=flops)
    report.time(f'down {label}: cuBLAS', [lambda d=d, h=h: F.linear(h, d) for d, h in zip(downs, hiddens)], sizes,
                flops=flops / 2)


def prefix_times(report: Report, sizes: Sizes) -> None:
    """Context Cache: select, gather GeGLU, down, merge against dense and gathered cuBLAS."""
    rows, width, mlp, k = sizes.visual + sizes.text, sizes.prefix_width, sizes.prefix_mlp, sizes.chosen[-1]
    weights = [normal(2 * mlp, width, scale=width**-0.5) for _ in range(sizes.prefix_layers)]
    downs = [normal(width, mlp, scale=mlp**-0.5) for _ in range(sizes.prefix_layers)]
    x, slot, slots = normal(rows, width), int32([1]), int32([0, 1, 1])
    for chosen in (*sizes.chosen, None):
        geglu_times(report, sizes, chosen, x, weights, downs)
    layers = 2 if DRY_RUN else 17
    for compared, name in ((64, 'sketch 64'), (width, 'full')):
        states, arena = [normal(rows, compared) for _ in range(layers)], normal(2, layers, sizes.visual, compared)
        for among in (slot, slots):
            report.time(f'select {k} of {sizes.visual} by {name}, {len(among)} references', [
                lambda s=s, r=arena[:, i], a=among: select.select_tokens(s, r, a, k, sizes.text, impl='triton')
                for i, s in enumerate(states)], sizes, bytes_=2.0 * (1 + len(among)) * sizes.visual * compared)
    taken, outs = normal(k + sizes.text, width), [normal(rows, width) for _ in range(layers)]
    _, inverse = select.select_tokens_reference(x, arena[:, 0], slot, k, sizes.text)
    report.time(f'merge {rows} rows', [
        lambda o=o, r=arena[:, i]: merge.merge_rows(o, taken, inverse, r, o, impl='triton')
        for i, o in enumerate(outs)], sizes, bytes_=6.0 * rows * width)


def expert_times(report: Report, sizes: Sizes) -> None:
    """Action Cache, the FFN alone: gathering kernels against dense cuBLAS."""
    rows, width, mlp, layers = sizes.suffix, sizes.expert_width, sizes.expert_mlp, sizes.expert_layers
    plain = [(normal(2 * mlp, width, scale=width**-0.5), normal(width, mlp, scale=mlp**-0.5)) for _ in range(layers)]
    packed = [neurons.pack_neurons(*gate_up.chunk(2), down) for gate_up, down in plain]
    x, slot, tiles = normal(rows, width), int32([1]), INTERPRETER if DRY_RUN else tiles_for(DEVICE)
    residual = normal(2, layers, rows, width)
    ranked = int32(torch.stack([torch.stack([torch.randperm(mlp) for _ in range(layers)]) for _ in range(2)]))
    work = neurons.neuron_workspace(rows, width, mlp, x.dtype, DEVICE, tiles=tiles)

    def gathering(i: int, n: int) -> object:
        return neurons.neuron_ffn(x, *packed[i], ranked[:, i], slot, n, residual[:, i], tiles=tiles, workspace=work,
                                  impl='triton')

    def whole(weights: list[tuple[torch.Tensor, torch.Tensor]]) -> list[Callable[[], object]]:
        return [lambda w=w: neurons.neuron_ffn(x, *w, tiles=tiles, workspace=work, impl='triton') for w in weights]

    def cublas(weights: list[tuple[torch.Tensor, torch.Tensor]]) -> list[Callable[[], object]]:
        return [lambda g=g, d=d: F.linear(geglu.activate(F.linear(x, g), impl='triton'), d) for g, d in weights]
    size = 6.0 * width
    report.time(f'expert FFN, all {mlp}: cuBLAS', cublas(plain), sizes, bytes_=size * mlp)
    report.time(f'expert FFN, all {mlp}: two launches', whole(packed), sizes, bytes_=size * mlp)
    for n in sizes.chosen_neurons:
        report.time(f'expert FFN, {n}: two launches', [lambda i=i, n=n: gathering(i, n) for i in range(layers)], sizes,
                    bytes_=size * n)


def small_times(report: Report, sizes: Sizes, rows: int, width: int) -> None:
    """Norms and RoPE, alone and with what they are fused with."""
    states = [(normal(rows, width), normal(rows, width)) for _ in range(sizes.expert_layers)]
    scale, shift, gate = (normal(width, dtype=torch.float32) for _ in range(3))
    moved = 2.0 * rows * width
    report.time(f'rms_norm {rows}x{width}', [lambda x=x: norms.rms_norm(x, scale, impl='triton') for x, _ in states],
                sizes, bytes_=2 * moved)
    report.time(f'gated_add_ada_rms_norm {rows}x{width}', [
        lambda x=x, d=d: norms.gated_add_ada_rms_norm(x, d, gate, scale, shift, impl='triton') for x, d in states],
        sizes, bytes_=4 * moved)
    qkvs = [normal(rows, (sizes.heads + 2) * sizes.head_dim) for _ in range(sizes.expert_layers)]
    angle = torch.rand(rows, sizes.head_dim // 2, device=DEVICE)
    cos, sin = angle.cos(), angle.sin()
    vector = normal(width)
    report.time(f'add_layer_norm {rows}x{width}', [
        lambda x=x, d=d: layer_norm.add_layer_norm(x, d, vector, vector, vector, impl='triton') for x, d in states],
        sizes, bytes_=4 * moved)
    report.time(f'rope {rows} rows', [lambda q=q: rope.rope(q, cos, sin, sizes.heads, impl='triton') for q in qkvs],
                sizes, bytes_=4.0 * qkvs[0].numel())


def main() -> int:
    """Run everything; the exit code is 1 when a check failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('json', help='where to write the results')
    parser.add_argument('--dry-run', action='store_true', help="tiny sizes in Triton's interpreter")
    parser.add_argument('--checks-only', action='store_true', help='no timings')
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    sizes, report = TINY if DRY_RUN else REAL, Report(arguments.json)
    run_checks(report, sizes, DEVICE)
    layer_checks(report, sizes, DEVICE)
    if not arguments.checks_only:
        layer_times(report, sizes, DEVICE)
        expert_times(report, sizes)
        prefix_times(report, sizes)
        small_times(report, sizes, sizes.visual + sizes.text, sizes.prefix_width)
        small_times(report, sizes, sizes.suffix, sizes.expert_width)
    failed = [row['name'] for row in report.data['checks'] if not row['passed']]
    print(f'{report.data["device"]}, torch {torch.__version__}, triton {triton.__version__}: '
          f'{len(report.data["checks"])} checks, failed: {", ".join(failed) or "none"}; {report.data["seconds"]:.0f} s')
    return int(bool(failed))


if __name__ == '__main__':
    sys.exit(main())
