# SPDX-License-Identifier: Apache-2.0
"""The doctor on machines made of files: what it must find there, and what it says to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from rmuscle_core.cli import main
from rmuscle_core.doctor import gpu, host, software
from rmuscle_core.doctor.finding import FAIL, OK, WARN, Host
from rmuscle_core.doctor.sensors import Sensors, device_name
from rmuscle_core.library import EpisodeLibrary

ROOT = Path(__file__).resolve().parents[3]
GOOD = {'proc/sys/net/core/rmem_max': '12582912', 'proc/sys/net/core/wmem_max': '12582912',
        'proc/sys/net/ipv4/ipfrag_high_thresh': '134217728', 'proc/sys/net/ipv4/ipfrag_time': '3',
        'proc/meminfo': 'MemTotal:  64000000 kB\nMemFree: 100 kB\nMemAvailable:  60000000 kB', 'dev/shm/.keep': ''}


@pytest.fixture
def machine(tmp_path):
    """Factory of a host whose files are the good ones, changed as told; None leaves one out."""
    def make(changed=(), environ=None, ros=True):
        for name, text in {**GOOD, **dict(changed)}.items():
            if text is not None:
                path = tmp_path / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text + '\n')
        return Host(tmp_path, environ or {}, ros)
    return make


def only(findings, level):
    return [finding for finding in findings if finding.level == level]


def test_v10_small_socket_buffers_come_with_the_command_and_exit_code_1(machine, capsys, monkeypatch):
    monkeypatch.setattr(software, 'has_ros', lambda: True)
    root = machine({'proc/sys/net/core/rmem_max': '212992'}).root
    assert main(['doctor', '--root', str(root)]) == 1
    said = capsys.readouterr().out
    assert 'FAIL socket buffers: net.core.rmem_max = 212992' in said
    assert 'sudo sysctl -w net.core.rmem_max=12582912;' in said  # only what is short


def test_v10_nothing_to_put_right_is_exit_code_0_and_json_says_the_same(machine, capsys, monkeypatch):
    monkeypatch.setattr(software, 'has_ros', lambda: False)  # else this machine's messages count
    assert main(['doctor', '--root', str(machine().root), '--json']) == 0
    told = json.loads(capsys.readouterr().out)
    assert told['ok'] and not [f for f in told['findings'] if f['level'] == FAIL]
    assert {'level': OK, 'name': 'socket buffers', 'fix': '',
            'text': 'net.core.rmem_max = 12582912, net.core.wmem_max = 12582912'} in told['findings']


@pytest.mark.parametrize(('changed', 'ros', 'level', 'words'), [
    ({'proc/sys/net/core/wmem_max': '212992'}, True, FAIL, ['net.core.wmem_max=12582912']),
    ({'proc/sys/net/core/rmem_max': '212992'}, False, WARN, ['net.core.rmem_max=12582912']),
    ({'proc/sys/net/ipv4/ipfrag_time': '30'}, True, WARN, ['net.ipv4.ipfrag_time=3']),
    ({'proc/sys/net/ipv4/ipfrag_high_thresh': '4194304'}, True, WARN, ['ipfrag_high_thresh=134217728']),
    ({'proc/sys/net/core/rmem_max': None, 'proc/sys/net/core/wmem_max': None}, True, WARN, ['on the host']),
    ({'proc/sys/net/core/rmem_max': 'garbage'}, True, OK, [])])
def test_v10_siblings_of_the_receive_buffer(machine, changed, ros, level, words):
    found = list(host.socket_buffers(machine(changed, ros=ros)))
    odd = [f for f in found if f.level != OK] or found[:1]
    assert len(odd) == 1 and odd[0].level == level and all(word in odd[0].fix for word in words)


def test_shared_memory_is_judged_by_size(machine, monkeypatch):
    import os
    assert [f.level for f in host.shared_memory(machine())] in ([OK], [WARN])  # as big as this disk
    sizes = os.statvfs_result((4096, 4096, 16384, 16000, 16000, 0, 0, 0, 0, 255))  # 64 MiB, Docker's default
    monkeypatch.setattr(os, 'statvfs', lambda _: sizes)
    found, = host.shared_memory(machine())
    assert found.level == WARN and '64 MiB' in found.text and '--shm-size' in found.fix
    monkeypatch.undo()
    shutil.rmtree(machine().root / 'dev')
    found, = host.shared_memory(Host(machine().root / 'nowhere'))
    assert found.level == FAIL and '--ipc=host' in found.fix


def test_both_names_of_the_profile_are_asked_for(machine, tmp_path):
    shipped = str(ROOT / 'config/fastdds_shm.xml')
    both = dict.fromkeys(host.PROFILES, shipped)
    assert [f.level for f in host.profile(machine(environ=both))] == [OK, OK]
    found = only(host.profile(machine(environ={host.PROFILES[0]: shipped})), WARN)
    assert len(found) == 1 and found[0].text.startswith(host.PROFILES[1]) and shipped.rpartition('/')[2] in found[0].fix
    other = {'RMW_IMPLEMENTATION': 'rmw_zenoh_cpp'}
    assert [f.level for f in host.profile(machine(environ=other))] == [OK]


@pytest.mark.parametrize('text', [None, 'no XML', '<dds><segment_size>524288</segment_size></dds>', '<dds/>',
                                  '<dds><segment_size/></dds>'])
def test_a_profile_that_does_nothing_is_found(machine, tmp_path, text):
    path = tmp_path / 'profile.xml'
    if text:
        path.write_text(text)
    found = only(host.profile(machine(environ={name: str(path) for name in host.PROFILES})), WARN)
    assert len(found) == 2 and all(str(path) in f.text and f.fix for f in found)


def test_scarce_memory_is_judged_by_what_is_available(machine):
    assert [f.level for f in host.memory(machine())] == [OK]  # though MemFree is next to nothing
    found, = host.memory(machine({'proc/meminfo': 'MemTotal: 64000000 kB\nMemAvailable: 900000 kB'}))
    assert found.level == WARN and '0.9 of 65.5 GB' in found.text
    assert [f.level for f in host.memory(machine({'proc/meminfo': ''}))] == [WARN]


def test_slow_governors_and_power_modes_are_found(machine):
    governor = 'sys/devices/system/cpu/cpu0/cpufreq/scaling_governor'
    found, = host.clocks(machine({governor: 'powersave'}))
    assert found.level == WARN and 'cpupower' in found.fix
    jetson = {governor: 'performance', 'etc/nv_tegra_release': '# R38', 'var/lib/nvpmodel/status': 'pmode:0001',
              'sys/class/devfreq/gpu-gpc-0/min_freq': '306000000', 'sys/class/devfreq/gpu-gpc-0/max_freq': '1575000000'}
    found = only(host.clocks(machine(jetson)), WARN)
    assert [f.fix for f in found] == ['sudo nvpmodel -m 0', 'sudo jetson_clocks']
    fast = {'var/lib/nvpmodel/status': 'pmode:0000', 'sys/class/devfreq/gpu-gpc-0/min_freq': '1575000000'}
    assert not only(host.clocks(machine({**jetson, **fast})), WARN)


@pytest.fixture
def thor(monkeypatch):
    """A Jetson Thor with wheels for CUDA 12.8, as far as torch tells."""
    def no_kernel(device):
        raise RuntimeError('CUDA error: no kernel image is available for execution on the device')

    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 1)
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda *_: (11, 0))
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda *_: 'NVIDIA Thor')
    monkeypatch.setattr(torch.cuda, 'get_arch_list', lambda: ['sm_80', 'sm_90', 'sm_100', 'sm_120'])
    monkeypatch.setattr(gpu, 'is_integrated', lambda _: True)
    monkeypatch.setattr('rmuscle_core.engine.probe.multiply', no_kernel)


def test_v32_wheels_that_do_not_know_the_gpu(thor, machine):
    found, = gpu.gpu(machine())
    assert found.level == FAIL and all(word in found.text for word in ('sm_110', 'sm_80', 'sm_120'))
    assert 'cu130' in found.fix


def test_v32_ptxas_of_triton_does_not_know_thor(thor, machine):
    found, = gpu.ptxas(machine())
    assert found.level == WARN and 'export TRITON_PTXAS_PATH=/usr/local/cuda/bin/ptxas' in found.fix


def test_v32_kernels_that_do_not_compile_are_a_warning_with_the_fix(thor, machine, monkeypatch):
    def no_ptxas(device):
        raise RuntimeError("PTXASError: ptxas fatal: Value 'sm_110a' is not defined for option 'gpu-name'")

    monkeypatch.setattr('rmuscle_core.engine.probe.multiply', lambda _: None)
    monkeypatch.setattr('rmuscle_core.engine.probe.launch_kernel', no_ptxas)
    monkeypatch.setattr(gpu.Sensors, '__init__', lambda self, device: None)
    monkeypatch.setattr(gpu.Sensors, 'read', lambda self: {'temperature_c': 91.0})
    whole, kernels, state = gpu.gpu(machine())
    assert whole.level == OK and 'memory shared' in whole.text
    assert kernels.level == WARN and 'sm_110a' in kernels.text and 'TRITON_PTXAS_PATH' in kernels.fix
    assert state.level == WARN and 'cooling' in state.fix


def test_a_driver_without_a_torch_for_it(machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    assert [f.level for f in gpu.gpu(machine())] == [WARN]
    found, = gpu.gpu(machine({'proc/driver/nvidia/version': 'NVRM version: 580', 'etc/nv_tegra_release': '# R38'}))
    assert found.level == FAIL and 'cu130' in found.fix


@pytest.mark.parametrize(('script', 'level', 'words'), [
    ('echo Cuda compilation tools, release 13.0, V13.0.48', OK, 'release 13.0'), ('exit 1', FAIL, 'cannot be run'),
    (None, FAIL, 'cannot be run')])
def test_ptxas_named_by_the_environment_is_run(machine, tmp_path, script, level, words):
    path = tmp_path / 'ptxas'
    if script:
        path.write_text(f'#!/bin/sh\n{script}\n')
        path.chmod(0o755)
    found, = gpu.ptxas(machine(environ={'TRITON_PTXAS_PATH': str(path)}))
    assert found.level == level and words in found.text


def test_old_and_missing_packages(machine, monkeypatch):
    given = {'torch': '2.9.1+cu128', 'triton': '3.11.0', 'numpy': '2.4.0rc1'}

    def version(package):
        if package not in given:
            raise software.PackageNotFoundError(package)
        return given[package]

    monkeypatch.setattr(software, 'version', version)
    found = {f.name: f for f in software.versions(machine())}
    assert found['torch'].level == FAIL and 'torch>=2.11' in found['torch'].fix
    assert (found['triton'].level, found['numpy'].level, found['h5py'].level) == (WARN, OK, FAIL)


def test_ros_needs_messages_and_a_sensible_domain(machine, monkeypatch):
    monkeypatch.setattr(software, 'find_spec', lambda _: None)
    assert [f.level for f in software.ros(machine(ros=False))] == [OK]
    found = {f.name: f for f in software.ros(machine(environ={'ROS_DOMAIN_ID': '150', 'ROS_DISTRO': 'jazzy'}))}
    assert 'jazzy' in found['ROS'].text and 'colcon build' in found['messages'].fix
    assert found['ROS domain'].level == WARN


def test_checkpoint_and_library_are_looked_at(capsys, tmp_path, monkeypatch):
    arguments = ['doctor', '--device', 'cpu', '--json', '--checkpoint']
    main([*arguments, str(ROOT / 'config/policy/transfer_cube')])
    found = {f['name']: f for f in json.loads(capsys.readouterr().out)['findings']}
    assert [found[name]['level'] for name in ('checkpoint', 'processors', 'memory for it')] == [OK] * 3
    assert main([*arguments, str(tmp_path / 'absent'), '--library', str(tmp_path / 'nothing')]) == 1
    found = {f['name']: f for f in json.loads(capsys.readouterr().out)['findings']}
    assert found['checkpoint']['level'] == found['library']['level'] == FAIL
    assert 'absent' in found['checkpoint']['text'] and found['checkpoint']['fix']


def test_a_library_is_left_as_it_is(capsys, tmp_path):
    EpisodeLibrary.create(tmp_path / 'library', {'weights': 'w'})
    (tmp_path / 'library/stack').mkdir()
    (tmp_path / 'library/stack/one.h5').write_text('broken')
    before = sorted(tmp_path.rglob('*'))
    main(['doctor', '--device', 'cpu', '--json', '--library', str(tmp_path / 'library')])
    found = {f['name']: f for f in json.loads(capsys.readouterr().out)['findings']}['library']
    assert found['level'] == WARN and 'one.h5' in found['text'] and '--repair' in found['fix']
    assert sorted(tmp_path.rglob('*')) == before


def test_sensors_of_a_processor_and_what_is_unknown(machine):
    zone = {'sys/class/thermal/thermal_zone0/type': 'x86_pkg_temp', 'sys/class/thermal/thermal_zone0/temp': '56000',
            'sys/class/thermal/thermal_zone1/type': 'iwlwifi', 'sys/class/thermal/thermal_zone1/temp': '99000',
            'sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq': '2400000',
            'proc/cpuinfo': 'processor : 0\nmodel name\t: Some CPU @ 2.4 GHz'}
    told = Sensors(torch.device('cpu'), machine(zone)).read()
    assert told['temperature_c'] == 56.0 and told['clock_mhz'] == 2400.0 and told['memory_free_gb'] > 0
    assert device_name(torch.device('cpu'), machine(zone)) == 'Some CPU @ 2.4 GHz'
    bare = Sensors(torch.device('cpu'), Host(machine().root / 'nowhere')).read()
    assert set(bare) == {'memory_free_gb'}
