# SPDX-License-Identifier: Apache-2.0
"""Other engines on the same checkpoint and inputs, where they are installed: LeRobot and FlashRT.

Neither is a dependency. Each is measured in its own precision and with its own preparation of the inputs, so its row
says what a user of it waits for, not what its kernels cost. Interfaces: LeRobot 0.6 (Apache-2.0, ``lerobot.policies``),
FlashRT 0.2 (Apache-2.0, ``flash_rt.load_model``).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import torch

from rmuscle_core.bench.timing import Work
from rmuscle_core.model import ModelConfig
from rmuscle_core.processing import ModelInputs

PROMPT = 'pick up the cube'  # what FlashRT tokenizes; the others are given token ids


def lerobot(checkpoint: Path, config: ModelConfig, inputs: ModelInputs, device: torch.device) -> Work:
    """One ``predict_action_chunk`` of LeRobot's own policy, eager, from tensors on the host to actions there."""
    from lerobot.policies.factory import get_policy_class

    policy = get_policy_class(config.kind).from_pretrained(str(checkpoint)).to(device).eval()
    batch = {f'observation.images.{view}': (image[None] + 1) / 2 for view, image in zip(inputs.views, inputs.images)}
    batch |= {'observation.state': inputs.state[None, :config.state_dim],
              'observation.language.tokens': inputs.token_ids[None],
              'observation.language.attention_mask': torch.ones(1, len(inputs.token_ids), dtype=torch.bool)}

    def work() -> None:
        policy.predict_action_chunk({name: value.to(device) for name, value in batch.items()}).cpu()

    return work


def flash_rt(checkpoint: Path, config: ModelConfig, inputs: ModelInputs, device: torch.device) -> Work:
    """One ``predict`` of FlashRT at 16 bit, from uint8 images on the host to actions there."""
    import flash_rt

    model = flash_rt.load_model(str(checkpoint), config=config.kind, framework='torch', num_views=len(inputs.views),
                                num_steps=config.steps, use_fp8=False, use_fp16=True, state_prompt_mode='fixed')
    images = [((image.permute(1, 2, 0) + 1) * 127.5).round().to(torch.uint8).numpy() for image in inputs.images]

    def work() -> None:
        model.predict(images=images, prompt=PROMPT, state=inputs.state_normalized)

    return work


PEERS: dict[str, Callable[[Path, ModelConfig, ModelInputs, torch.device], Work]] = {
    'lerobot': lerobot, 'flash_rt': flash_rt}


def open_peers(checkpoint: Path, config: ModelConfig, inputs: ModelInputs,
               device: torch.device) -> tuple[dict[str, Work], dict[str, str]]:
    """The peers that can run here, each called once, and why the others cannot, by name."""
    works, reasons = {}, {}
    for name, make in PEERS.items():
        if importlib.util.find_spec(name) is None:
            reasons[name] = 'not installed'
            continue
        try:
            work = make(checkpoint, config, inputs, device)
            work()
        except Exception as error:  # noqa: BLE001 - whatever another project raises must not end our measurement
            reasons[name] = f'{type(error).__name__}: {error}'
        else:
            works[name] = work
    return works, reasons
