# SPDX-License-Identifier: Apache-2.0
"""How the node gets its policy; torch is imported only when one is asked for."""

from __future__ import annotations

from typing import Any


def load_config(checkpoint: str) -> Any:
    """Read the checkpoint's ModelConfig, without its weights."""
    from rmuscle_core.model import load_config as load
    return load(checkpoint)


def load_policy(checkpoint: str, settings: Any, library: str | None, device: str, cameras: tuple[str, ...]) -> Any:
    """Load a MusclePolicy; "auto" takes a CUDA device where there is one."""
    import torch

    from rmuscle_core.policy import MusclePolicy
    if device == 'auto':
        device = 'cuda' if torch.cuda.is_available() else 'cpu'
    return MusclePolicy.load(checkpoint, settings, library=library, device=device, cameras=cameras)
