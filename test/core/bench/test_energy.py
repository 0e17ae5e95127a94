# SPDX-License-Identifier: Apache-2.0
"""The power rails of a Jetson, as its kernel presents them in files."""

import time

import pytest
import torch

from rmuscle_core.bench import energy


def write_rail(folder, number, name, millivolts, milliamperes):
    folder.mkdir(parents=True, exist_ok=True)
    for suffix, text in ((f'in{number}_label', name), (f'in{number}_input', millivolts),
                         (f'curr{number}_input', milliamperes)):
        (folder / suffix).write_text(f'{text}\n')


def joules_per_second(meter, monkeypatch):
    """The meter reports joules per repetition; with known repetitions that gives watts."""
    monkeypatch.setattr(energy, 'SECONDS', 0.05)
    count = 0

    def work():
        nonlocal count
        count += 1

    start = time.perf_counter()
    joules = meter(work) * count
    return joules, time.perf_counter() - start


def test_the_supply_rail_is_taken_alone(tmp_path, monkeypatch):
    rails = tmp_path / '1-0040' / 'hwmon' / 'hwmon3'
    write_rail(rails, 1, 'VDD_IN', 20000, 1500)
    write_rail(rails, 2, 'VDD_GPU', 10000, 1000)
    joules, elapsed = joules_per_second(energy.rail_meter(tmp_path), monkeypatch)
    assert 30 * 0.05 <= joules <= 30 * elapsed


def test_without_a_supply_rail_all_are_added(tmp_path, monkeypatch):
    rails = tmp_path / '1-0040' / 'hwmon' / 'hwmon3'
    write_rail(rails, 1, 'VDD_GPU', 10000, 1000)
    write_rail(rails, 2, 'VDD_CPU', 10000, 500)
    joules, elapsed = joules_per_second(energy.rail_meter(tmp_path), monkeypatch)
    assert 15 * 0.05 <= joules <= 15 * elapsed


def test_no_rails_no_meter(tmp_path):
    assert energy.rail_meter(tmp_path) is None
    assert energy.find_meter(torch.device('cpu')) is None


def test_a_label_without_its_readings_is_not_a_rail(tmp_path):
    rails = tmp_path / '1-0040' / 'hwmon' / 'hwmon3'
    write_rail(rails, 1, 'VDD_IN', 20000, 1500)
    (rails / 'curr1_input').unlink()
    assert energy.rail_meter(tmp_path) is None


@pytest.mark.gpu
def test_nvml_counts_energy_on_a_gpu():
    pytest.importorskip('pynvml')
    meter = energy.find_meter(torch.device('cuda'))
    x = torch.ones(1024, 1024, device='cuda')
    assert meter is None or meter(lambda: (x @ x).sum().item()) > 0
