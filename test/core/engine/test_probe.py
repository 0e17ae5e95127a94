# SPDX-License-Identifier: Apache-2.0
"""V32: a toolchain that does not know the GPU, mocked, since no test machine has one of each."""

import pytest
import torch
from engine_parts import CAMERAS, make_inputs, small_model

from rmuscle_core.engine import build, probe
from rmuscle_core.engine.eager import EagerEngine
from rmuscle_core.engine.graphs import GraphEngine
from rmuscle_core.engine.plan import CallPlan
from rmuscle_core.errors import SettingsError
from rmuscle_core.settings import Settings

GPU, SETTINGS = torch.device('cuda'), Settings().with_values(slots=2)


class PTXASError(Exception):
    pass


def fail(error):
    def raise_it(*_):
        raise error
    return raise_it


@pytest.fixture
def gpu(monkeypatch):
    """A machine whose host memory plays a GPU that every kernel fits."""
    monkeypatch.setattr(build, 'accelerated', lambda device: True)
    monkeypatch.setattr(build, 'obstacle', lambda config: '')
    return monkeypatch


def dense(engine):
    return engine.act(engine.embed(make_inputs(0)), CallPlan(), None)[0]


@pytest.mark.parametrize(('error', 'fix'), [
    (PTXASError("PTXAS error: Internal Triton PTX codegen error\nptxas fatal : Value 'sm_110a' is not defined"),
     'TRITON_PTXAS_PATH'),
    (RuntimeError('Failed to find C compiler. Please specify via CC environment variable.'), 'gcc'),
    (RuntimeError('Triton Error [CUDA]: device kernel image is invalid'), 'versions')])
def test_v32_kernels_that_do_not_compile_cost_only_speed(gpu, caplog, error, fix):
    model = small_model()
    gpu.setattr(probe, 'launch_kernel', fail(error))
    engine = build.build_engine(model, SETTINGS, len(CAMERAS))
    assert type(engine) is EagerEngine and fix in caplog.text
    assert len(engine.problems) == 1 and fix in engine.problems[0] and '\n' not in engine.problems[0]
    assert torch.equal(dense(engine), dense(EagerEngine(model, SETTINGS, len(CAMERAS))))


def test_kernels_that_run_are_used(gpu):
    engine = build.build_engine(small_model(), SETTINGS, len(CAMERAS))
    assert isinstance(engine, GraphEngine) and engine.problems == []


@pytest.mark.parametrize(('capability', 'built', 'words'), [
    ((11, 0), ['sm_80', 'sm_90', 'sm_100', 'sm_120'], ['sm_110', 'cu130', 'sm_80, sm_90, sm_100, sm_120']),
    ((12, 1), ['sm_80'], ['sm_121', 'cu130']), ((12, 0), ['sm_80', 'sm_90'], ['sm_120', 'cu128']),
    ((6, 1), ['sm_80'], ['sm_61', 'cu126'])])
def test_v32_a_torch_without_kernels_for_the_gpu_is_refused_with_the_wheels(monkeypatch, capability, built, words):
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 1)
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device: capability)
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda device: 'NVIDIA Thor')
    monkeypatch.setattr(torch.cuda, 'get_arch_list', lambda: built)
    monkeypatch.setattr(probe, 'multiply', fail(RuntimeError('CUDA error: no kernel image is available for execution')))
    with pytest.raises(SettingsError) as refusal:
        probe.require_torch_kernels(GPU)
    assert all(word in str(refusal.value) for word in [*words, 'NVIDIA Thor'])


def test_other_failures_of_the_first_product_are_not_explained_away(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 1)
    monkeypatch.setattr(probe, 'multiply', fail(RuntimeError('CUDA error: device-side assert triggered')))
    with pytest.raises(RuntimeError, match='assert'):
        probe.require_torch_kernels(GPU)


@pytest.mark.parametrize('error', [torch.OutOfMemoryError('no memory'), RuntimeError('illegal memory access')])
def test_a_device_that_fails_is_not_taken_for_a_missing_compiler(monkeypatch, error):
    monkeypatch.setattr(probe, 'launch_kernel', fail(error))
    with pytest.raises(type(error)):
        probe.triton_obstacle(GPU)


@pytest.mark.parametrize('device', ['cuda:1', 'toaster'])
def test_a_device_that_is_not_here_is_left_to_the_loader(monkeypatch, device):
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 1)
    monkeypatch.setattr(probe, 'multiply', fail(RuntimeError('invalid device ordinal')))
    probe.require_torch_kernels(device)


def test_the_probes_run_what_they_say():
    cpu = torch.device('cpu')
    probe.multiply(cpu)
    assert probe.triton_obstacle(cpu) == ''


def test_v31_fewer_slots_where_memory_does_not_reach_for_all(monkeypatch):
    monkeypatch.setattr(build, 'affordable_slots', lambda *_: 1)
    engine = build.build_engine(small_model(), SETTINGS, len(CAMERAS))
    assert engine.arena.slots == 1 and '1 of the 2 reference slots' in engine.problems[0]


@pytest.mark.parametrize(('fits', 'left'), [(5, 3), (1, 1), (0, 0)])
@pytest.mark.parametrize('text', ['CUDA out of memory', 'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "Alloc.cpp":1'])
def test_v31_slots_are_halved_where_memory_was_less_than_it_said(gpu, fits, left, text):
    def allocate(model, settings, views):
        if settings.slots > fits:
            raise RuntimeError(text)
        return GraphEngine(model, settings, views)

    gpu.setattr(build, '_with_slots', allocate)
    model = small_model()
    engine = build.build_engine(model, Settings().with_values(slots=12), len(CAMERAS))
    assert engine.arena.slots == left and f'{left} of the 12' in engine.problems[0]
    assert torch.isfinite(dense(engine)).all()


def test_v31_a_model_that_does_not_fit_is_refused(gpu):
    gpu.setattr(build, '_with_slots', fail(torch.OutOfMemoryError('CUDA out of memory')))
    with pytest.raises(SettingsError, match='no memory for a dense policy call'):
        build.build_engine(small_model(), SETTINGS, len(CAMERAS))
