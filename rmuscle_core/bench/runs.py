# SPDX-License-Identifier: Apache-2.0
"""The kinds of ``rmuscle bench``: each measures, prints a table and returns plain data."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from rmuscle_core.bench import calls, layers, memory, report, roofline
from rmuscle_core.bench.energy import find_meter
from rmuscle_core.bench.peers import open_peers
from rmuscle_core.bench.reconstruct import measure_interference
from rmuscle_core.bench.retrieval import measure_retrieval
from rmuscle_core.bench.sizes import PI05, TEXT, random_model, sized
from rmuscle_core.bench.timing import Work, summary
from rmuscle_core.engine.budget import memory_budget, require_memory
from rmuscle_core.engine.build import build_engine
from rmuscle_core.engine.eager import EagerEngine
from rmuscle_core.engine.plan import CallPlan, plan_call
from rmuscle_core.library import ReferenceId
from rmuscle_core.model import VLA, ModelConfig, load_model
from rmuscle_core.model.config import DTYPES
from rmuscle_core.processing import ModelInputs
from rmuscle_core.settings import PROFILES, Settings

SECONDS = 90  # what the measured rounds of one case may take where --rounds does not say
FEWEST, MOST = 5, 50


def run_layer(args: argparse.Namespace, device: torch.device) -> dict[str, object]:
    """One real-size layer of each kind."""
    dtype, result = DTYPES[args.dtype], {}
    sizes = {'prefix': f'{layers.TOKENS} visual rows, no text x {layers.PREFIX.width} x {layers.PREFIX.mlp}',
             'expert': f'{layers.CHUNK} x {layers.EXPERT.width} x {layers.EXPERT.mlp}, {layers.GROUP} steps of a mask'}
    for name, compare in (('prefix', layers.compare_prefix), ('expert', layers.compare_expert)):
        with report.progress_bar() as bar:
            rounds = args.rounds or (5 if name == 'prefix' else 30)
            task = bar.add_task(name, total=rounds + 1)
            found = compare(rounds, device, dtype, progress=lambda b=bar, t=task: b.advance(t))
        rows = report.comparison_rows(found, cpu=device.type == 'cpu')
        report.print_comparison(f'{name} FFN, {sizes[name]}', rows)
        result |= {name: {'size': sizes[name], 'rows': rows}, **report.speedups(rows, name)}
    return result


def run_calls(args: argparse.Namespace, device: torch.device) -> dict[str, object]:
    """Whole policy calls for every asked number of views and chunk length; the flat speedups are the first case's."""
    peaks = roofline.measure_peaks(device, DTYPES[args.dtype])
    cases = [_calls(args, device, views, chunk, peaks)
             for views in args.views or [None] for chunk in args.chunk or [None]]
    return {'peaks': {'gflops': peaks.flops / 1e9, 'gbps': peaks.bandwidth / 1e9, 'source': peaks.source},
            'cases': cases, **report.speedups(cases[0]['rows'])}


def _calls(args: argparse.Namespace, device: torch.device, views: int | None, chunk: int | None,
           peaks: roofline.Peaks) -> dict[str, object]:
    settings = bench_settings(args)
    model, text = bench_model(args, device, settings, views, chunk)
    inputs = calls.random_inputs(model.config, text)
    variants = calls.make_variants(model, settings, inputs, args.compile)
    peers = _open_peers(args, model.config, inputs, device) if args.peers else {}
    rounds = args.rounds or _affordable(lambda: calls.call(variants[0], inputs), 2 * (len(variants) + len(peers)) - 1)
    with report.progress_bar() as bar:
        task = bar.add_task('calls', total=None)
        comparison = calls.compare_calls(variants, inputs, rounds, lambda: bar.advance(task), peers)
    rows = report.comparison_rows(comparison, cpu=device.type == 'cpu')
    meter, config, count = find_meter(device), model.config, len(model.config.cameras)
    element = torch.empty(0, dtype=config.compute_dtype).element_size()
    for variant in variants:
        row = rows[variant.name]
        flops, moved = roofline.work(config, count, text, variant.plan, element)
        seconds = row['ms']['p50'] / 1e3
        row |= {'floor ms': roofline.floors(config, count, text, variant.plan, element, peaks)['total'],
                'GFLOP/s': flops / seconds / 1e9, 'GB/s': moved / seconds / 1e9}
        if meter:
            row['J'] = meter(lambda v=variant: calls.call(v, inputs))
    case = {'views': count, 'chunk': config.chunk_size, 'text': text, 'steps': config.steps, 'rows': rows,
            'flop_shares': _flop_shares(config, count, text, element)}
    engine = variants[0].engine
    if isinstance(engine, EagerEngine) and device.type == 'cpu':
        case['time_shares'] = calls.time_shares(engine, inputs)
    name = args.checkpoint or args.size
    report.print_comparison(f'{name}, {count} views, chunk {config.chunk_size}, {type(engine).__name__}', rows)
    for shares in ('flop_shares', 'time_shares'):
        if shares in case:
            print(f'dense {shares.replace("_", " ")}:', ', '.join(f'{k} {v:.0%}' for k, v in case[shares].items()))
    return case


def run_reconstruct(args: argparse.Namespace, device: torch.device) -> dict[str, object]:
    """Cached calls with and without expansions between them."""
    settings = replace(bench_settings(args), slots=2)
    model, text = bench_model(args, device, settings, *(v[0] if v else None for v in (args.views, args.chunk)))
    inputs = calls.random_inputs(model.config, text)
    engine = build_engine(model, settings, len(model.config.cameras))
    reference = calls.record(engine, calls.perturbed(inputs), ReferenceId('bench', 'reference', 0))
    plan = plan_call(settings, model.config, reference.prefix.shape[0], text)
    variant = calls.Variant('full.default', engine, plan, 0)
    calls.expand(engine, reference, 0, plan)
    with report.progress_bar() as bar:
        rounds = args.rounds or 3 * MOST  # a 99th percentile takes many
        task = bar.add_task('calls', total=2 * rounds)
        found = measure_interference(variant, reference, 1, inputs, rounds, lambda: bar.advance(task))
    rows = {name: {**summary(values), 'p99': round(float(np.percentile(values, 99)), 4)} for name, values in (
        ('idle', found.idle), ('reconstructing', found.working),
        ('idle, CPU time', found.idle_cpu), ('reconstructing, CPU time', found.working_cpu))}
    report.print_table('cached call, milliseconds', ['', 'p50', 'p95', 'p99', 'calls'],
                       [[name, row['p50'], row['p95'], row['p99'], row['n']] for name, row in rows.items()])
    ratios = {f'{at}{key}_ratio': rows[f'reconstructing{kind}'][at] / rows[f'idle{kind}'][at]
              for kind, key in (('', ''), (', CPU time', '_cpu')) for at in ('p50', 'p99')}
    print('reconstructing over idle:', ', '.join(f'{name} {ratio:.2f}' for name, ratio in ratios.items()))
    print(f'{found.entries_per_second:.2f} references per second while the robot executes; {found.expanded} expanded, '
          f'{found.interrupted} stopped by a call')
    return {'rows': rows, **ratios, 'entries_per_second': found.entries_per_second, 'expanded': found.expanded,
            'interrupted': found.interrupted}


def run_retrieval(args: argparse.Namespace, device: torch.device) -> dict[str, object]:
    """Host time of looking up and planning among 800 references in 32 episodes."""
    samples = measure_retrieval(repeats=args.rounds or 300)
    rows = {name: summary(values) for name, values in samples.items()}
    report.print_table('800 references, 32 episodes, microseconds', ['', 'p50', 'p95'],
                       [[name, row['p50'], row['p95']] for name, row in rows.items()])
    return {'entries': 800, 'microseconds': rows}


def run_roofline(args: argparse.Namespace, device: torch.device) -> dict[str, object]:
    """Least times of the full-size model; estimates, nothing is measured."""
    text, result = TEXT['pi05'], {}
    config, fp8 = replace(PI05, weight_dtype=args.weight_dtype), args.weight_dtype == 'fp8'
    bits = '16 bit, FFN weights 8 bit' if fp8 else '16 bit'
    for views in args.views or [3]:
        tokens = views * PI05.vision.tokens
        plans = {'dense': CallPlan(), **{profile: plan_call(Settings().with_values(profile=profile), PI05, tokens, text)
                                         for profile in PROFILES}}
        for name, peaks in roofline.KNOWN.items():
            floors = {key: roofline.floors(config, views, text, plan, 2, peaks) for key, plan in plans.items()}
            dense = floors['dense']['total']
            report.print_table(f'{name} ({peaks.source}), pi0.5, {views} views, {bits}: least milliseconds',
                               ['', *floors['dense'], 'speedup at most'],
                               [[key, *floor.values(), dense / floor['total']] for key, floor in floors.items()])
            result[f'{name}, {views} views'] = floors
    return {'floors_ms': result}


def run_memory(args: argparse.Namespace, device: torch.device) -> dict[str, object]:
    """Bytes per reference at full size, and per library beside the paper's table."""
    table = memory.memory_table()
    memory.print_memory(table)
    return table


RUNS: dict[str, Callable[[argparse.Namespace, torch.device], dict[str, object]]] = {
    'calls': run_calls, 'layer': run_layer, 'reconstruct': run_reconstruct, 'retrieval': run_retrieval,
    'roofline': run_roofline, 'memory': run_memory}


def bench_settings(args: argparse.Namespace) -> Settings:
    """The defaults, with the sketch asked for and as many slots as there are profiles."""
    settings = replace(Settings(), slots=len(PROFILES))
    return settings if args.sketch is None else settings.with_values(sketch_width=args.sketch)


def bench_model(args: argparse.Namespace, device: torch.device, settings: Settings, views: int | None = None,
                chunk: int | None = None) -> tuple[VLA, int]:
    """The checkpoint or the random model asked for, and the length of its prompts.

    Raises SettingsError when it would not fit into the device's memory.
    """
    if args.checkpoint:
        model = load_model(args.checkpoint, device=str(device), dtype=args.dtype, weight_dtype=args.weight_dtype)
        return model, min(TEXT['small'], model.config.prompt_length)
    config = sized(args.size, views, chunk, args.dtype, args.weight_dtype)
    require_memory(memory_budget(config, settings, len(config.cameras)), settings.slots, device)
    return random_model(config, device), TEXT[args.size]


def _open_peers(args: argparse.Namespace, config: ModelConfig, inputs: ModelInputs,
                device: torch.device) -> dict[str, Work]:
    works, reasons = open_peers(args.checkpoint, config, inputs, device)
    for name, reason in reasons.items():
        print(f'{name} is left out: {reason}')
    return works


def _flop_shares(config: ModelConfig, views: int, text: int, element: int) -> dict[str, float]:
    flops = {name: sum(f for f, _ in ops) for name, ops in
             roofline.stages(config, views, text, CallPlan(), element).items()}
    return {name: round(value / sum(flops.values()), 3) for name, value in flops.items()}


def _affordable(work: Callable[[], object], per_round: int) -> int:
    """Rounds of so many works each that fit into SECONDS."""
    work()
    start = time.perf_counter()
    work()
    return int(min(max(SECONDS / (per_round * (time.perf_counter() - start)), FEWEST), MOST))
