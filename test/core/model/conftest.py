# SPDX-License-Identifier: Apache-2.0
"""Checkpoints written by LeRobot at tiny sizes, with LeRobot's own outputs; and a model of the same sizes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from rmuscle_core.model import VLA, ModelConfig, TransformerConfig, VisionConfig

PARITY = Path(__file__).parents[2] / 'data' / 'parity'


@pytest.fixture(scope='session')
def parity() -> Path:
    return PARITY


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy of the pi0.5 float32 checkpoint, to be damaged."""
    return Path(shutil.copytree(PARITY / 'tiny_pi05_float32', tmp_path / 'checkpoint'))


@pytest.fixture(params=['pi05', 'pi0'])
def random_model(request: pytest.FixtureRequest) -> VLA:
    torch.manual_seed(0)
    config = ModelConfig(request.param, VisionConfig(28, 14, 32, 2, 48, 2), TransformerConfig(48, 3, 64, 4, 1, 16),
                         TransformerConfig(32, 3, 40, 4, 1, 16), vocab=60, cameras=('top', 'wrist'), state_dim=5,
                         action_dim=4, padded_dim=8, chunk_size=6, steps=4, prompt_length=12, execute_steps=5)
    return VLA(config).eval()
