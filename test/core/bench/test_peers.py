# SPDX-License-Identifier: Apache-2.0
"""Other engines beside ours. Neither can be installed where these tests run, so stand-ins with the signatures of
LeRobot 0.6 and FlashRT 0.2 receive the calls; what is tested is what we hand over and how a failure is reported."""

import json
import sys
from types import ModuleType
from typing import ClassVar

import numpy as np
import pytest
import torch

from rmuscle_core.bench import calls, peers
from rmuscle_core.bench.sizes import SIZES, TEXT, random_model
from rmuscle_core.cli import main
from rmuscle_core.model import save_checkpoint

CONFIG = SIZES['tiny']


@pytest.fixture
def stand_in(monkeypatch):
    """Make a module importable under a name, with attributes."""
    def install(name, **attributes):
        parent = ''
        for part in name.split('.'):
            parent = f'{parent}.{part}'.strip('.')
            module = ModuleType(parent)
            module.__spec__ = type(sys.__spec__)(parent, None)
            monkeypatch.setitem(sys.modules, parent, module)
        vars(sys.modules[name]).update(attributes)
    return install


class LeRobotPolicy(torch.nn.Module):
    seen: ClassVar[list] = []

    @classmethod
    def from_pretrained(cls, directory):
        cls.seen.append(directory)
        return cls()

    def predict_action_chunk(self, batch):
        self.seen.append(batch)
        return torch.zeros(1, CONFIG.chunk_size, CONFIG.action_dim)


class FlashModel:
    seen: ClassVar[list] = []

    def predict(self, images, prompt, state):
        self.seen.append((images, prompt, state))
        return np.zeros((CONFIG.chunk_size, CONFIG.action_dim), np.float32)


def test_peers_get_the_inputs_our_engine_gets(stand_in, tmp_path, capsys):
    kinds, options = [], {}
    stand_in('lerobot.policies.factory', get_policy_class=lambda kind: kinds.append(kind) or LeRobotPolicy)
    stand_in('flash_rt', load_model=lambda directory, **kwargs: options.update(kwargs) or FlashModel())
    save_checkpoint(random_model(CONFIG, torch.device('cpu')), tmp_path)
    assert main(['bench', '--checkpoint', str(tmp_path), '--peers', '--rounds', '1', '--json']) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])['cases'][0]['rows']
    assert rows['lerobot']['speedup']['n'] == rows['flash_rt']['speedup']['n'] == 1
    inputs = calls.random_inputs(CONFIG, min(TEXT['small'], CONFIG.prompt_length))
    assert kinds == ['pi05'] and LeRobotPolicy.seen[0] == str(tmp_path)
    batch = LeRobotPolicy.seen[-1]
    assert torch.equal(batch['observation.language.tokens'][0], inputs.token_ids)
    for view, image in zip(inputs.views, inputs.images):
        assert torch.allclose(batch[f'observation.images.{view}'][0] * 2 - 1, image, atol=1e-6)
    images, _, state = FlashModel.seen[-1]
    assert images[0].dtype == np.uint8 and images[0].shape == (*inputs.images.shape[2:], 3)
    assert options['num_views'] == len(inputs.views) and options['num_steps'] == CONFIG.steps
    assert np.array_equal(state, inputs.state_normalized)


def test_a_peer_that_fails_is_left_out_with_its_reason(stand_in):
    def refuse(directory, **options):
        raise RuntimeError('no kernel for this GPU')

    stand_in('flash_rt', load_model=refuse)
    works, reasons = peers.open_peers('x', CONFIG, calls.random_inputs(CONFIG, 5), torch.device('cpu'))
    assert not works and reasons == {'lerobot': 'not installed', 'flash_rt': 'RuntimeError: no kernel for this GPU'}


def test_peers_need_a_checkpoint(capsys):
    assert main(['bench', '--size', 'tiny', '--peers', '--rounds', '1']) == 2
    assert '--checkpoint' in capsys.readouterr().err
