# SPDX-License-Identifier: Apache-2.0
"""One policy call of an earlier episode, in the compact form the library keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch


class ReferenceId(NamedTuple):
    """Names one policy call: task as in the folder name, episode as in the file name, call counted from 0."""

    task: str
    episode: str
    call: int

    def __str__(self) -> str:
        return f'{self.task}/{self.episode}#{self.call}'


@dataclass(frozen=True, eq=False)
class Reference:
    """Everything a call leaves behind; all on the host.

    prefix: bfloat16 [T,D], input embeddings of the visual tokens, views in the order of ``views``.
    token_ids: int32 [P], the prompt. states: float32 [h,S], normalised, newest last, h grows to the history length.
    key: float32 [V,C] for retrieval. chunk: float32 [H,A] in robot units.
    neurons: uint16 [G,M,n_mask], expert FFN neurons per denoise-step group and layer, most important first; None
        until ranked.
    """

    id: ReferenceId
    prefix: torch.Tensor
    token_ids: np.ndarray
    states: np.ndarray
    key: np.ndarray
    neurons: np.ndarray | None
    chunk: np.ndarray
    views: tuple[str, ...]
