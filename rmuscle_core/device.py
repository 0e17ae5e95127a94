# SPDX-License-Identifier: Apache-2.0
"""The device a user named."""

from __future__ import annotations

import torch

from rmuscle_core.errors import SettingsError


def open_device(name: str | torch.device) -> torch.device:
    """The torch device, 'cpu' or a GPU of this machine; raises SettingsError for any other."""
    try:
        device = torch.device(name)
    except RuntimeError:  # its text lists every backend of torch
        device = None
    here = ['cpu', *(f'cuda:{index}' for index in range(torch.cuda.device_count()))]
    if device is None or (str(device) not in here and not (str(device) == 'cuda' and len(here) > 1)):
        advice = '' if torch.cuda.is_available() else '; a GPU needs its driver and a torch built with CUDA'
        raise SettingsError(f'device must be one of {", ".join(here)} on this machine, not {str(name)!r}{advice}')
    return device
