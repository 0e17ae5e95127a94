# SPDX-License-Identifier: Apache-2.0
"""Energy of a policy call where the machine can tell: NVML's counter, or the power rails of a Jetson."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

RAILS = Path('/sys/bus/i2c/drivers/ina3221')
SECONDS = 1.0  # the counters move in steps of tens of milliseconds
RAIL_PERIOD_S = 0.02


def find_meter(device: torch.device) -> Callable[[Callable[[], object]], float] | None:
    """What measures joules per repetition of some work on this device; None when nothing can."""
    if device.type != 'cuda':
        return None
    return _nvml_meter(device) or rail_meter(RAILS)


def rail_meter(root: Path) -> Callable[[Callable[[], object]], float] | None:
    """Meter over the module's supply rail (the one called VDD_IN or VIN, else all rails together)."""
    rails = [(label.read_text().strip(), label) for label in sorted(root.glob('*/hwmon/hwmon*/in*_label'))]
    total = [label for name, label in rails if name in ('VDD_IN', 'VIN', 'VIN_SYS_5V0')]
    pairs = [(label.with_name(label.name.replace('_label', '_input')),
              label.with_name(label.name.replace('in', 'curr', 1).replace('_label', '_input')))
             for label in total or [label for _, label in rails]]
    pairs = [pair for pair in pairs if all(p.exists() for p in pair)]
    if not pairs:
        return None

    def watts() -> float:
        return sum(int(volt.read_text()) * int(ampere.read_text()) for volt, ampere in pairs) * 1e-6

    def measure(work: Callable[[], object]) -> float:
        samples, stop = [watts()], threading.Event()

        def sample() -> None:
            while not stop.wait(RAIL_PERIOD_S):
                samples.append(watts())

        sampler = threading.Thread(target=sample, name='power rails')
        sampler.start()
        try:
            seconds, count = _repeat(work)
        finally:
            stop.set()
            sampler.join()
        return sum(samples) / len(samples) * seconds / count

    return measure


def _nvml_meter(device: torch.device) -> Callable[[Callable[[], object]], float] | None:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f'GPU-{torch.cuda.get_device_properties(device).uuid}')
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except pynvml.NVMLError:  # no driver library, or a device without the counter
        return None

    def measure(work: Callable[[], object]) -> float:
        before = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)  # millijoules
        _, count = _repeat(work)
        return (pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) - before) / 1e3 / count

    return measure


def _repeat(work: Callable[[], object]) -> tuple[float, int]:
    """Run the work for about SECONDS; seconds and repetitions."""
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < SECONDS:
        work()
        count += 1
    return time.perf_counter() - start, count
