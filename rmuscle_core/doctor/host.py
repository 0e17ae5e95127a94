# SPDX-License-Identifier: Apache-2.0
"""The host: memory, clocks, and what images pass through on their way here."""

from __future__ import annotations

import os
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

from rmuscle_core.doctor.finding import FAIL, OK, WARN, Finding, Host

# name -> (least, advised), in bytes or seconds; one 1280 x 720 RGB image is 2.8 MB, in fragments of 64 kB
BUFFERS = {'net.core.rmem_max': (4_194_304, 12_582_912), 'net.core.wmem_max': (4_194_304, 12_582_912)}
FRAGMENTS = {'net.ipv4.ipfrag_high_thresh': (134_217_728, 134_217_728), 'net.ipv4.ipfrag_time': (3, 3)}
SEGMENT = 32 << 20  # bytes, of config/fastdds_shm.xml, for each process that publishes images
PROFILES = ('FASTRTPS_DEFAULT_PROFILES_FILE', 'FASTDDS_DEFAULT_PROFILES_FILE')  # Jazzy reads the first, Kilted both


def socket_buffers(host: Host) -> Iterator[Finding]:
    """Large messages need large socket buffers: the kernel drops the fragments that do not fit."""
    for name, table, level in (('socket buffers', BUFFERS, FAIL if host.ros else WARN),
                               ('IP fragments', FRAGMENTS, WARN)):
        read = {key: host.number('proc/sys/' + key.replace('.', '/')) for key in table}
        found = {key: value for key, value in read.items() if value is not None}
        short = [key for key, value in found.items() if _worse(key, value, table[key][0])]
        shown = ', '.join(f'{key} = {value}' for key, value in found.items())
        if short:
            command = 'sudo sysctl -w ' + ' '.join(f'{key}={table[key][1]}' for key in short)
            yield Finding(level, name, f'{shown}: images over UDP (cameras on another host) get lost',
                          f'{command}; the same lines in /etc/sysctl.d/60-rmuscle.conf keep it')
        elif shown:
            yield Finding(OK, name, shown)
        else:
            yield Finding(WARN, name, 'not visible here, as in a container with a network of its own',
                          'run rmuscle doctor on the host')


def _worse(key: str, value: int, wanted: int) -> bool:
    return value > wanted if key.endswith('_time') else value < wanted


def shared_memory(host: Host) -> Iterator[Finding]:
    """/dev/shm, through which Fast DDS passes messages between processes of one host."""
    place = host.root / 'dev/shm'
    try:
        space = os.statvfs(place)
    except OSError:
        yield Finding(FAIL, 'shared memory', f'{place} does not exist: messages between processes go by UDP',
                      'mount a tmpfs there; in a container: --ipc=host or --shm-size=1g')
        return
    size, free = space.f_frsize * space.f_blocks, space.f_frsize * space.f_bavail
    text = f'{place}: {size >> 20} MiB, {free >> 20} MiB free'
    if free < 4 * SEGMENT:
        yield Finding(WARN, 'shared memory', f'{text}; each process that publishes images takes {SEGMENT >> 20} MiB',
                      'sudo mount -o remount,size=1G /dev/shm; in a container: --shm-size=1g; after crashes: '
                      'fastdds shm clean')
    else:
        yield Finding(OK, 'shared memory', text)


def profile(host: Host) -> Iterator[Finding]:
    """The Fast DDS profile with a shared-memory segment that an image fits into."""
    middleware = host.environ.get('RMW_IMPLEMENTATION', 'rmw_fastrtps_cpp')
    if 'fastrtps' not in middleware:
        yield Finding(OK, 'Fast DDS profile', f'not used: RMW_IMPLEMENTATION is {middleware}')
        return
    files = {name: host.environ[name] for name in PROFILES if host.environ.get(name)}
    fix = ('export ' + ' '.join(f'{name}=<path>/config/fastdds_shm.xml' for name in PROFILES)
           + ' where the camera drivers start; the names differ between releases, so set both')
    if len(files) < len(PROFILES):
        missing = ' and '.join(name for name in PROFILES if name not in files)
        yield Finding(WARN, 'Fast DDS profile', f'{missing} not set: images larger than the default segment of 512 KiB '
                      'get lost between processes of one host', fix)
    for name, path in files.items():
        problem = _profile_problem(Path(path))
        yield Finding(WARN if problem else OK, 'Fast DDS profile', f'{name} = {path}{problem}', fix if problem else '')


def _profile_problem(path: Path) -> str:
    try:
        sizes = [int(e.text) for e in ElementTree.parse(path).iter() if e.tag.rpartition('}')[2] == 'segment_size']
    except (OSError, ElementTree.ParseError, TypeError, ValueError) as error:
        return f' cannot be used ({error}); Fast DDS ignores it'
    return '' if sizes and min(sizes) >= SEGMENT // 4 else ' sets no shared-memory segment that images fit into'


def memory(host: Host) -> Iterator[Finding]:
    """What the host has left; on a machine whose GPU shares it (Jetson), what the GPU has left too."""
    lines = (line.split() for line in (host.read('proc/meminfo') or '').splitlines())
    sizes = {words[0].rstrip(':'): int(words[1]) * 1024 for words in lines if len(words) > 1 and words[1].isdigit()}
    if 'MemAvailable' not in sizes:
        yield Finding(WARN, 'memory', f'{host.root / "proc/meminfo"} cannot be read')
        return
    free, total = sizes['MemAvailable'], sizes.get('MemTotal', 0)
    text = f'{free / 1e9:.1f} of {total / 1e9:.1f} GB available'
    if free < 0.1 * total:
        yield Finding(WARN, 'memory', text, 'end what is not needed; a model that does not fit is swapped, and slow')
    else:
        yield Finding(OK, 'memory', text)


def clocks(host: Host) -> Iterator[Finding]:
    """Governors and power modes that leave the machine slower than it can be."""
    policies = sorted((host.root / 'sys/devices/system/cpu').glob('cpu[0-9]*/cpufreq/scaling_governor'))
    governors = {host.read(str(path.relative_to(host.root))) for path in policies} - {None}
    if governors:
        slow = governors - {'performance'}
        yield Finding(WARN if slow else OK, 'CPU clock', f'governor {", ".join(sorted(governors))}',
                      'sudo cpupower frequency-set -g performance' if slow else '')
    if host.read('etc/nv_tegra_release') is not None or host.read('proc/device-tree/compatible') is not None:
        yield from _jetson(host)


def _jetson(host: Host) -> Iterator[Finding]:
    mode = host.read('var/lib/nvpmodel/status')
    if mode is not None:
        best = mode.rpartition(':')[2].strip('0 ') == ''
        yield Finding(OK if best else WARN, 'power mode', f'nvpmodel {mode}', '' if best else 'sudo nvpmodel -m 0')
    for folder in sorted((host.root / 'sys/class/devfreq').glob('*gpu*')):
        now, most = (host.number(str((folder / name).relative_to(host.root))) for name in ('min_freq', 'max_freq'))
        if now is not None and most is not None:
            text = f'{folder.name} between {now / 1e6:.0f} and {most / 1e6:.0f} MHz'
            yield Finding(OK if now == most else WARN, 'GPU clock', text, '' if now == most else 'sudo jetson_clocks')
