# SPDX-License-Identifier: Apache-2.0
"""What a measurement ran on."""

from __future__ import annotations

import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

GPU_QUERY = 'clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu,driver_version'


def describe(device: torch.device) -> dict[str, object]:
    """Device, clocks, software versions and commit, as plain data; what cannot be found out is left out."""
    found = {'device': _processor() if device.type == 'cpu' else torch.cuda.get_device_name(device),
             'threads': torch.get_num_threads(), 'python': platform.python_version(), 'torch': torch.__version__}
    for package in ('triton', 'rmuscle'):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if commit := _output('git', '-C', str(Path(__file__).parent), 'describe', '--always', '--dirty'):
        found['commit'] = commit
    if device.type == 'cuda':
        index = str(device.index or 0)
        values = _output('nvidia-smi', '-i', index, f'--query-gpu={GPU_QUERY}', '--format=csv,noheader')
        found.update(zip(GPU_QUERY.split(','), values.split(', ')) if values else ())
    return found


def _processor() -> str:
    try:
        lines = Path('/proc/cpuinfo').read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(':')[2].strip() for line in lines if line.startswith(('model name', 'Model'))]
    return f'{names[0] if names else platform.machine()}, {torch.backends.cpu.get_cpu_capability()}'


def _output(*command: str) -> str:
    """A program's output; empty when the program is missing or fails."""
    if shutil.which(command[0]) is None:
        return ''
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    return done.stdout.strip() if done.returncode == 0 else ''
