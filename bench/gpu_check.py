#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402 - what triton reads at import is set before it is imported
"""Everything a GPU has to settle, in one run: are kernels and graphs right, what does a call cost, which tiles win.

    scripts/gpu_check                                          # minutes on a data-centre GPU
    scripts/gpu_check --dry-run                                # every step at tiny size, without a GPU
    scripts/gpu_check --out NAME.json --only real,reconstruct  # some steps

Steps are independent: one that fails is a row with its traceback, and the JSON is written after each.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DRY_RUN = '--dry-run' in sys.argv
if DRY_RUN:
    os.environ['TRITON_INTERPRET'] = '1'  # read when triton is first imported
sys.path.insert(0, str(ROOT))
if importlib.util.find_spec('rmuscle_kernels') is None:
    _alias = tempfile.TemporaryDirectory()  # removed when the process ends
    Path(_alias.name, 'rmuscle_kernels').symlink_to(ROOT / 'kernels')
    sys.path.insert(0, _alias.name)

import gpu_engine as engine
import kernel_probe as probe
import torch
import triton
from attention_probe import attention_checks, attention_times
from layer_probe import layer_checks, layer_times

from rmuscle_core.bench import roofline
from rmuscle_core.bench.sizes import SIZES, TEXT, random_model
from rmuscle_core.engine.budget import memory_budget, require_memory
from rmuscle_core.engine.eager import EagerEngine
from rmuscle_core.engine.graphs import GraphEngine
from rmuscle_core.engine.packed import PackedVLA
from rmuscle_core.model import ModelConfig, TransformerConfig, VisionConfig
from rmuscle_core.settings import PROFILES

DEVICE = torch.device('cpu' if DRY_RUN else 'cuda:0')
LOW = {} if DRY_RUN else {'dtype': 'bfloat16', 'numerics': 'fast'}
SHALLOW = replace(SIZES['medium'], vision=VisionConfig(28, 14, 64, 1, 128, 2), vocab=300, **LOW,
                  prefix=TransformerConfig(256, 3, 512, head_dim=64),
                  expert=TransformerConfig(256, 3, 512, head_dim=64))
MEDIUM = SHALLOW if DRY_RUN else replace(SIZES['medium'], **LOW)
REAL = SIZES['tiny'] if DRY_RUN else SIZES['pi05']
REAL_TEXT = TEXT['tiny' if DRY_RUN else 'pi05']
COUNT = 2 if DRY_RUN else 40


class Results:
    """Rows by step, on disk after each."""

    def __init__(self, path: Path, only: set[str]) -> None:
        self.path, self.only, self.start = path, only, time.perf_counter()
        self.data: dict = {'steps': {}}

    def step(self, name: str, run: Callable[[], object]) -> None:
        """Run one step and keep what it returns, or why it failed."""
        if self.only and name.split()[0] not in self.only:
            return
        print(f'== {name} ({time.perf_counter() - self.start:.0f} s)', flush=True)
        since, row = time.perf_counter(), {}
        try:
            row['result'] = run()
        except Exception as failure:  # noqa: BLE001 - the other steps are still worth their time
            row['failed'] = f'{type(failure).__name__}: {failure}'[:2000]
            row['traceback'] = traceback.format_exc()[-4000:]
            print(row['traceback'], flush=True)
        row['seconds'] = time.perf_counter() - since
        self.data['steps'][name] = row
        self.data['seconds'] = time.perf_counter() - self.start
        self.path.write_text(json.dumps(self.data, indent=1, default=str))
        print(json.dumps(row.get('result'), default=str)[:1500], flush=True)

    @property
    def failed(self) -> list[str]:
        return [name for name, row in self.data['steps'].items() if 'failed' in row]


def machine() -> dict[str, object]:
    """What ran this: device, clocks, versions, commit."""
    query = 'name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu'
    smi, commit = (subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False).stdout.strip()
                   if not DRY_RUN or command[0] == 'git' else '' for command in
                   (['nvidia-smi', f'--query-gpu={query}', '--format=csv,noheader'], ['git', 'rev-parse', 'HEAD']))
    name = 'interpreter' if DRY_RUN else torch.cuda.get_device_name(DEVICE)
    return {'device': name, 'nvidia-smi': smi, 'torch': torch.__version__, 'triton': triton.__version__,
            'python': platform.python_version(), 'commit': commit}


def kernels(path: Path, part: str) -> dict[str, object]:
    """kernel_probe's checks or timings, with attention added."""
    report = probe.Report(str(path.with_suffix(f'.{part}.json')))
    sizes = probe.TINY if DRY_RUN else probe.REAL
    if part == 'checks':
        probe.run_checks(report, sizes, DEVICE)
        attention_checks(report, DEVICE)
        layer_checks(report, sizes, DEVICE)
        bad = [row for row in report.data['checks'] if not row['passed']]
        if bad:
            raise AssertionError(f'{len(bad)} of {len(report.data["checks"])} failed: {json.dumps(bad)[:1500]}')
        return {'checks': len(report.data['checks'])}
    layer_times(report, sizes, DEVICE)
    attention_times(report, sizes, DEVICE)
    probe.expert_times(report, sizes)
    probe.prefix_times(report, sizes)
    probe.small_times(report, sizes, sizes.visual + sizes.text, sizes.prefix_width)
    probe.small_times(report, sizes, sizes.suffix, sizes.expert_width)
    return {'times': report.data['times']}


def random_at(config: ModelConfig):
    return random_model(config, DEVICE)


def early() -> dict[str, object]:
    """The engine's checks once more with kernels launched while their predecessors drain."""
    with engine.early_launch():
        return {'packed': engine.packed_against_plain(random_at(SHALLOW), 11),
                'graphs': engine.replay_against_eager(random_at(MEDIUM), 12),
                'race': engine.replays_under_expansion(random_at(MEDIUM), 12, 4 if DRY_RUN else 500)}


class RealSize:
    """The pi0.5-sized model, made once; its engines one after another."""

    def __init__(self) -> None:
        self.peaks, self.rows = None, {}

    def build(self) -> dict[str, object]:
        """Budget, model, and what it really took."""
        settings = engine.SETTINGS
        budget = memory_budget(REAL, settings, len(REAL.cameras))
        require_memory(budget, settings.slots, DEVICE)
        since = time.perf_counter()
        self.model = random_at(REAL)
        took = {'budget': budget, 'seconds': time.perf_counter() - since}
        if not DRY_RUN:
            took['allocated'] = torch.cuda.memory_allocated()
        self.peaks = roofline.measure_peaks(DEVICE, REAL.compute_dtype)
        return took | {'peak tflops': self.peaks.flops / 1e12, 'peak gbs': self.peaks.bandwidth / 1e9}

    def eager(self) -> dict[str, object]:
        """The plain model in the same dtype, as it runs without an engine."""
        plain = engine.make_scene(EagerEngine(self.model, engine.SETTINGS, len(REAL.cameras)), REAL_TEXT)
        return {mode: engine.measure(plain, mode, 'default', max(COUNT // 4, 1), self.peaks)
                for mode in ('dense', 'full')}

    def pack(self) -> dict[str, object]:
        self.packed = PackedVLA(self.model)
        engine.release()
        return {} if DRY_RUN else {'allocated': torch.cuda.memory_allocated(),
                                   'peak': torch.cuda.max_memory_allocated()}

    def table(self, views: int, profiles: tuple[str, ...] = tuple(PROFILES)) -> dict[str, object]:
        """Dense, each cache alone, both at each profile; dense once more at the end."""
        self.scene = engine.make_scene(GraphEngine(self.packed, engine.SETTINGS, views), REAL_TEXT)
        cases = {'dense': ('dense', 'default', {}), 'context': ('context', 'default', {}),
                 'action': ('action', 'default', {}),
                 **{f'action, residual {kind}': ('action', 'default', {'residual': kind})
                    for kind in ('reference', 'none')},
                 **{f'full {profile}': ('full', profile, {}) for profile in profiles},
                 'dense again': ('dense', 'default', {})}
        rows = {name: engine.measure(self.scene, mode, profile, COUNT, self.peaks, **values)
                for name, (mode, profile, values) in cases.items()}
        for row in rows.values():
            row['speedup'] = (rows['dense']['p50'] + rows['dense again']['p50']) / 2 / row['p50']
        return rows

    def choice(self, way: AbstractContextManager) -> dict[str, object]:
        """Dense and full, captured while ``way`` holds, and how far their results are from the present choice's."""
        before = {mode: self.scene.call(*self.scene.plan(mode)) for mode in ('dense', 'full')}
        with way:
            scene = engine.make_scene(GraphEngine(self.packed, engine.SETTINGS, len(REAL.cameras)), REAL_TEXT)
            return {mode: {**engine.measure(scene, mode, 'default', COUNT, self.peaks),
                           'difference': engine.largest(scene.call(*scene.plan(mode)), before[mode])}
                    for mode in ('dense', 'full')}

    def shorten(self, chunk: int) -> dict[str, object]:
        """The same weights with another chunk length."""
        config = replace(REAL, chunk_size=chunk)
        del self.packed, self.scene
        engine.release()
        self.model.config = self.model.prefix.config = self.model.expert.config = config
        self.packed = PackedVLA(self.model)
        return self.table(len(REAL.cameras), ('default',))


def run_all(results: Results) -> None:
    """All steps, the ones that decide correctness first."""
    results.step('machine', machine)
    results.step('kernels checks', lambda: kernels(results.path, 'checks'))
    results.step('packed shallow', lambda: engine.packed_against_plain(random_at(SHALLOW), 11))
    results.step('packed medium', lambda: engine.packed_against_plain(random_at(MEDIUM), 12))
    results.step('graphs shallow', lambda: engine.replay_against_eager(random_at(SHALLOW), 11))
    results.step('graphs medium', lambda: engine.replay_against_eager(random_at(MEDIUM), 12))
    results.step('race', lambda: engine.replays_under_expansion(random_at(MEDIUM), 12, 4 if DRY_RUN else 500))
    results.step('early', early)
    real = RealSize()
    results.step('real build', real.build)
    results.step('real eager', real.eager)
    results.step('real pack', real.pack)
    results.step('real table 3 views', lambda: real.table(len(REAL.cameras)))
    results.step('real reconstruct', lambda: engine.reconstruction(real.scene, 5 * COUNT))
    if not DRY_RUN:
        for mode in ('dense', 'full'):
            results.step(f'real profile {mode}', lambda mode=mode: engine.kernel_counts(real.scene, mode))
    results.step('real early launch', lambda: real.choice(engine.early_launch()))
    results.step('real geglu by cuBLAS', lambda: real.choice(engine.geglu_by(None)))
    tma = probe.Tile(128, 128, 64, 8, 3, descriptors=True)
    results.step('real geglu by TMA', lambda: real.choice(engine.geglu_by(None if DRY_RUN else tma)))
    results.step('real table fewer views', lambda: real.table(len(REAL.cameras) - 1, ('default',)))
    results.step('real table chunk 10', lambda: real.shorten(3 if DRY_RUN else 10))
    results.step('kernels times', lambda: kernels(results.path, 'times'))


def print_table(results: Results) -> None:
    """The bench rows, one line each."""
    print(f'\n{"":44s} {"p50":>7s} {"p95":>7s} {"speedup":>7s} {"floor":>6s} {"TF/s":>5s} {"GB/s":>5s}  device ms')
    for step, row in results.data['steps'].items():
        result = row.get('result')
        for name, values in result.items() if isinstance(result, dict) else ():
            if isinstance(values, dict) and 'floor' in values:
                device = values.get('device', {})
                parts = ' '.join(f'{k} {v:.2f}' for k, v in device.items())
                parts += f' host {values["p50"] - sum(device.values()):.2f}' if device else ''
                print(f'{step[5:] + ": " + name:44s} {values["p50"]:7.2f} {values["p95"]:7.2f} '
                      f'{values.get("speedup", float("nan")):7.2f} {values["floor"]:6.2f} {values["tflops"]:5.0f} '
                      f'{values["gbs"]:5.0f}  {parts}')


def default_out() -> Path:
    """bench/results/GPU-DATE.json; a dry run measures nothing worth keeping."""
    name = 'dry-run' if DRY_RUN else torch.cuda.get_device_name().split()[-1].lower()
    folder = Path(tempfile.gettempdir()) if DRY_RUN else Path(__file__).parent / 'results'
    return folder / f'{name}-{date.today()}.json'


def main() -> int:
    """Run the steps; the exit code is 1 when one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=Path, help='where to write the results (default: below bench/results, named by '
                        'GPU and date; below the temporary folder for a dry run)')
    parser.add_argument('--dry-run', action='store_true', help='every step at tiny size, without a GPU')
    parser.add_argument('--only', default='', help='first words of steps, separated by commas')
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    results = Results(arguments.out or default_out(), {part for part in arguments.only.split(',') if part})
    run_all(results)
    print_table(results)
    print(f'failed: {", ".join(results.failed) or "none"}; {results.data["seconds"]:.0f} s; {results.path}')
    return int(bool(results.failed))


if __name__ == '__main__':
    sys.exit(main())
