# SPDX-License-Identifier: Apache-2.0
"""The folded vision tower against the plain one it shares its weights with."""

from __future__ import annotations

import pytest
import torch

from rmuscle_core.engine.packed_vision import PackedVision
from rmuscle_core.model import VisionConfig
from rmuscle_core.model.siglip import Vision


@pytest.mark.parametrize('dtype, tolerance', [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize('views', [1, 3])
def test_equals_the_plain_tower(views, dtype, tolerance):
    torch.manual_seed(0)
    vision = Vision(VisionConfig(16, 4, 24, 3, 40, 2), 32, dtype)
    for parameter in vision.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    images = torch.rand(views, 3, 16, 16) * 2 - 1
    with torch.inference_mode():
        packed, plain = PackedVision(vision)(images), vision(images)
    assert packed.shape == plain.shape
    torch.testing.assert_close(packed, plain, atol=tolerance * plain.abs().max().item(), rtol=0)
