# SPDX-License-Identifier: Apache-2.0
"""What a device tells of itself while it works: memory, temperature, clock."""

from __future__ import annotations

import math
import platform
from typing import Any

import torch

from rmuscle_core.doctor.finding import Host
from rmuscle_core.memory_free import available_bytes

HOT_C = 85.0  # GPUs lower their clock from about here on
# bits of NVML's reasons for a lowered clock: power brake, thermal (software, hardware), hardware in general
SLOWED = 0x08 | 0x20 | 0x40 | 0x80


def device_name(device: torch.device, host: Host | None = None) -> str:
    """Product name of a GPU, or of the host's processor."""
    if device.type == 'cuda':
        return torch.cuda.get_device_name(device)
    lines = ((host or Host()).read('proc/cpuinfo') or '').splitlines()
    return next((line.partition(':')[2].strip() for line in lines if line.startswith('model name')), platform.machine())


class Sensors:
    """Reads a device; what this machine does not tell is left out. NVML for a GPU, sysfs where there is none (Jetson).

    ``read`` takes a millisecond or so; units are in the names.
    """

    def __init__(self, device: torch.device, host: Host | None = None):
        self.device, self._host = device, host or Host()
        self.name = device_name(device, self._host)
        self._nvml, self._handle = _open_nvml(device)

    def read(self) -> dict[str, float]:
        """memory_free_gb, of a GPU memory_torch_gb too, temperature_c, clock_mhz, slowed (1 for heat or power)."""
        found = {'memory_free_gb': available_bytes(self.device) / 1e9}
        if self.device.type == 'cuda':
            found['memory_torch_gb'] = torch.cuda.memory_reserved(self.device) / 1e9
        found |= {**self._from_sysfs(), **self._from_nvml()}
        return {name: value for name, value in found.items() if not math.isnan(value)}

    def _from_nvml(self) -> dict[str, float]:
        nvml, handle = self._nvml, self._handle
        if nvml is None:
            return {}
        asked = {'temperature_c': lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
                 'clock_mhz': lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
                 'clock_max_mhz': lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
                 'slowed': lambda: bool(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle) & SLOWED)}
        found = {}
        for name, ask in asked.items():
            try:
                found[name] = float(ask())
            except nvml.NVMLError:  # each query may be unknown to a device, on Jetson most are
                continue
        return found

    def _from_sysfs(self) -> dict[str, float]:
        gpu = self.device.type == 'cuda'
        wanted, root = ('gpu',) if gpu else ('x86_pkg_temp', 'cpu'), self._host.root
        zones = [zone for zone in sorted((root / 'sys/class/thermal').glob('thermal_zone*'))
                 if any(word in (self._read(zone / 'type') or '').lower() for word in wanted)]
        heat = [float(text) / 1e3 for text in (self._read(zone / 'temp') for zone in zones) if text]
        pattern, unit = ('sys/class/devfreq/*gpu*/cur_freq', 1e6) if gpu else (
            'sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq', 1e3)
        speeds = [float(text) / unit for text in map(self._read, sorted(root.glob(pattern))) if text]
        return {'temperature_c': max(heat, default=math.nan), 'clock_mhz': max(speeds, default=math.nan)}

    def _read(self, path: Any) -> str | None:
        return self._host.read(str(path.relative_to(self._host.root)))


def _open_nvml(device: torch.device) -> tuple[Any, Any]:
    """(module, handle of the device), or (None, None) where NVML is missing or does not know it."""
    if device.type != 'cuda':
        return None, None
    try:
        import pynvml
        pynvml.nvmlInit()
        # By UUID: NVML counts all GPUs, torch those that CUDA_VISIBLE_DEVICES leaves.
        uuid = torch.cuda.get_device_properties(device).uuid
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f'GPU-{uuid}'.encode())
    except Exception:  # noqa: BLE001 - not installed, no library, no permission: the sensors are a courtesy
        return None, None
