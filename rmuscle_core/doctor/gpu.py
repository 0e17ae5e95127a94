# SPDX-License-Identifier: Apache-2.0
"""The GPU and the software that has to know it: torch, Triton, ptxas."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import torch

from rmuscle_core.doctor.finding import FAIL, OK, WARN, Finding, Host
from rmuscle_core.doctor.sensors import HOT_C, Sensors
from rmuscle_core.engine.probe import require_torch_kernels, triton_obstacle
from rmuscle_core.errors import SettingsError
from rmuscle_core.memory_free import is_integrated

PTXAS = ('TRITON_PTXAS_PATH', 'TRITON_PTXAS_BLACKWELL_PATH')
THOR = (11, 0)  # compute capability; the ptxas that comes with Triton does not know it


def gpu(host: Host) -> Iterator[Finding]:
    """Every GPU: does torch compute on it, do Triton kernels run, how warm and how fast is it."""
    if not torch.cuda.is_available():
        driver = host.read('proc/driver/nvidia/version')
        if driver or host.read('etc/nv_tegra_release'):
            yield Finding(FAIL, 'GPU', f'there is a driver, but torch {torch.__version__} cannot use it '
                          f'(built for CUDA {torch.version.cuda or "none"})', _reinstall(host))
        else:
            yield Finding(WARN, 'GPU', 'none found: a full-size policy takes seconds per call on the CPU')
        return
    for index in range(torch.cuda.device_count()):
        yield from _one(torch.device('cuda', index))


def _reinstall(host: Host) -> str:
    where = 'cu130' if host.read('etc/nv_tegra_release') else 'cu128'
    return f'pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/{where}; check nvidia-smi'


def _one(device: torch.device) -> Iterator[Finding]:
    major, minor = torch.cuda.get_device_capability(device)
    name = f'GPU {device.index}'
    what = (f'{torch.cuda.get_device_name(device)}, sm_{major}{minor}, '
            f'{"memory shared with the host" if is_integrated(device) else "own memory"}')
    try:
        require_torch_kernels(device)
    except SettingsError as error:
        reason, _, fix = str(error).rpartition('; ')
        yield Finding(FAIL, name, reason, fix)
        return
    except RuntimeError as error:  # a driver that fails may say anything
        yield Finding(FAIL, name, f'{what}: a matrix product fails ({error})', 'check nvidia-smi and dmesg for "Xid"')
        return
    yield Finding(OK, name, f'{what}; torch is built for {", ".join(torch.cuda.get_arch_list())}')
    yield _kernels(device, name)
    values = Sensors(device).read()
    hot = values.get('temperature_c', 0) > HOT_C or values.get('slowed', 0)
    shown = ', '.join(f'{key} {value:.4g}' for key, value in values.items())
    fix = 'improve cooling or raise the power limit' if hot else ''
    yield Finding(WARN if hot else OK, f'{name} state', shown, fix)


def _kernels(device: torch.device, name: str) -> Finding:
    obstacle = triton_obstacle(device)
    if obstacle:
        reason, _, fix = obstacle.rpartition('; ')
        return Finding(WARN, f'{name} kernels', f'{reason}; calls run on the plain engine, several times slower', fix)
    return Finding(OK, f'{name} kernels', 'a Triton kernel compiled and ran')


def ptxas(host: Host) -> Iterator[Finding]:
    """The assembler that Triton uses: its own, or the one an environment variable names."""
    if find_spec('triton') is None:
        yield Finding(WARN, 'ptxas', 'Triton is not installed: calls run on the plain engine',
                      "pip install 'rmuscle[gpu]'")
        return
    named = {name: host.environ[name] for name in PTXAS if host.environ.get(name)}
    for name, path in named.items():
        version = _version(path)
        yield Finding(OK if version else FAIL, 'ptxas', f'{name} = {path}: {version or "cannot be run"}',
                      '' if version else f'let {name} name the ptxas of a CUDA toolkit, or unset it')
    thor = torch.cuda.is_available() and torch.cuda.get_device_capability() == THOR
    if thor and not named:
        yield Finding(WARN, 'ptxas', 'this GPU (sm_110) is not known to the ptxas that comes with Triton',
                      ' '.join(f'export {name}=/usr/local/cuda/bin/ptxas' for name in PTXAS))
    elif not named:
        yield Finding(OK, 'ptxas', "Triton's own")


def _version(path: str) -> str:
    if not (Path(path).is_file() and os.access(path, os.X_OK)):
        return ''
    try:
        done = subprocess.run([path, '--version'], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ''
    lines = [line for line in done.stdout.splitlines() if 'release' in line]
    return lines[0].strip() if lines and done.returncode == 0 else ''
