# SPDX-License-Identifier: Apache-2.0
"""How the node gets its policy; torch is imported only when one is asked for."""

from __future__ import annotations

import logging
from os.path import expanduser
from typing import Any

CORE = 'rmuscle_core'


def load_config(checkpoint: str) -> Any:
    """Read the checkpoint's ModelConfig, without its weights."""
    from rmuscle_core.model import load_config as load
    return load(expanduser(checkpoint))


def load_policy(checkpoint: str, settings: Any, library: str | None, device: str, cameras: tuple[str, ...],
                joints: tuple[str, ...]) -> Any:
    """Load a MusclePolicy; "auto" takes a CUDA device where there is one. No shell expands ~ in a parameter file."""
    import torch

    from rmuscle_core.policy import MusclePolicy
    _log_to_ros()
    if device == 'auto':
        device = 'cuda' if torch.cuda.is_available() else 'cpu'
    return MusclePolicy.load(expanduser(checkpoint), settings, library=library and expanduser(library), device=device,
                             cameras=cameras, joints=joints)


class _ToRos(logging.Handler):
    """What the core logs, in the ROS log."""

    def emit(self, record: logging.LogRecord) -> None:
        from rclpy.logging import get_logger
        log = get_logger('policy_node')
        # One line per severity: rclpy does not let one change it.
        if record.levelno >= logging.ERROR:
            log.error(record.getMessage())
        elif record.levelno >= logging.WARNING:
            log.warning(record.getMessage())
        else:
            log.info(record.getMessage())


def _log_to_ros() -> None:
    core = logging.getLogger(CORE)
    if not any(isinstance(handler, _ToRos) for handler in core.handlers):
        core.addHandler(_ToRos())
        core.setLevel(logging.INFO)
