# SPDX-License-Identifier: Apache-2.0
"""Episodes at control rate that fit the tiny policy, and building a library from any form of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_policy import CAMERAS, JOINTS

from rmuscle_core.cli import main
from rmuscle_core.library import EpisodeLibrary
from rmuscle_core.library.recording import RecordedEpisode, write_recording
from rmuscle_core.observation import Observation

FPS, STEPS = 20, 4  # the tiny policy executes four actions of a chunk
NAMES = tuple(f'joint{number}' for number in range(JOINTS))


def movie(seed, frames=18, prompt='lift the cube'):
    """Smooth pictures that change from frame to frame."""
    random = np.random.default_rng(seed)
    row, column, colour = np.mgrid[:32, :32, :3]
    pictures = [{camera: (128 + 90 * np.sin(row / 9 + place + t / 5) * np.cos(column / 7 - colour)).astype(np.uint8)
                 for place, camera in enumerate(CAMERAS)} for t in range(frames)]
    states = random.uniform(-0.8, 0.8, (frames, JOINTS)).astype(np.float32)
    return [Observation(pictures[t], states[t], prompt, t / FPS) for t in range(frames)]


@pytest.fixture(scope='session')
def episodes():
    return [movie(0), movie(1, 13), movie(2, 9, 'Fold it')]


@pytest.fixture
def parameters(tmp_path):
    """The policy node's parameter file of this robot."""
    path = tmp_path / 'robot.yaml'
    path.write_text(f'/**:\n  ros__parameters:\n    cameras: [{", ".join(CAMERAS)}]\n'
                    f'    joint_names: [{", ".join(NAMES)}]\n    control_rate_hz: {float(FPS)}\n')
    return path


@pytest.fixture
def build(tiny_checkpoint, tmp_path):
    """build(episodes, library name, *options): exit code of ``rmuscle library build``, and the library's folder."""
    def run(source, name='library', *options):
        out = tmp_path / name
        return main(['library', 'build', '--checkpoint', str(tiny_checkpoint), '--episodes', str(source), '--out',
                     str(out), *map(str, options)]), out
    return run


@pytest.fixture(scope='session')
def contents():
    """contents(library folder): its episodes in order, as (task, success, [what each reference holds])."""
    def read(path):
        library = EpisodeLibrary.open(path, set_aside=False)
        assert library.problems == []
        return [(e.task, e.success, [holds(library.load(e.id(call))) for call in range(len(e.keys))])
                for e in library.episodes]

    def holds(reference):
        arrays = (reference.token_ids, reference.states, reference.key, reference.neurons, reference.chunk)
        return (reference.views, reference.prefix.view(torch.int16).numpy().tobytes(),
                *((array.dtype.str, array.shape, array.tobytes()) for array in arrays))
    return read


@pytest.fixture
def direct(episodes, build, tmp_path, contents):
    """What the library holds that is built from our own recording of the same policy calls."""
    write_recording(tmp_path / 'direct.h5', [RecordedEpisode(f'episode-{number:03d}', True, episode[::STEPS])
                                             for number, episode in enumerate(episodes)])
    code, library = build(tmp_path / 'direct.h5', 'direct')
    assert code == 0
    found = contents(library)
    assert [len(calls) for _, _, calls in found] == [3, 5, 4]
    return found
