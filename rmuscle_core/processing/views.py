# SPDX-License-Identifier: Apache-2.0
"""A robot's pictures as the model's views: which camera is which, in what order, resized by which rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from rmuscle_core.errors import ObservationError
from rmuscle_core.processing.images import to_image


@dataclass(frozen=True)
class Views:
    """cameras: the model's, in checkpoint order, on which rotary positions depend. rename: further names of them.

    bar: value of the letterbox bars. antialiased: openpi's resize rule instead of LeRobot's.
    """

    cameras: tuple[str, ...]
    size: int
    bar: float = -1.0
    antialiased: bool = False
    rename: Mapping[str, str] = field(default_factory=dict)

    def encode(self, pictures: Mapping[str, np.ndarray]) -> tuple[torch.Tensor, tuple[str, ...]]:
        """Return float32 [V,3,S,S] in [-1, 1] and the V camera names; an absent camera is left out.

        Raises ObservationError naming the camera.
        """
        named = self._named(pictures)
        views = tuple(name for name in self.cameras if name in named)
        return torch.stack([self._image(name, named[name]) for name in views]), views

    def report(self) -> dict[str, str]:
        rule = 'bilinear with antialiasing on bytes' if self.antialiased else 'bilinear'
        renamed = ', '.join(f'{a} as {b}' for a, b in sorted(self.rename.items()) if a != b)
        return {'images': f'RGB, resized with pad to {self.size}x{self.size}, {rule}, bars {self.bar:g}',
                **({'cameras renamed': renamed} if renamed else {})}

    def _named(self, pictures: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        if not isinstance(pictures, Mapping):
            raise ObservationError(f'the pictures must be a mapping of camera names, not {type(pictures).__name__}')
        named: dict[str, np.ndarray] = {}
        for name, picture in pictures.items():
            known = name if name in self.cameras else self.rename.get(name)
            if known not in self.cameras:
                raise ObservationError(f'camera {name!r} is not one the checkpoint has ({", ".join(self.cameras)}); '
                                       'map it to one of them or leave it out')
            if known in named:
                raise ObservationError(f'two pictures are meant for camera {known!r}, {name!r} among them; leave one '
                                       'out')
            named[known] = picture
        if not named:
            raise ObservationError(f'the observation has no picture; at least one of {", ".join(self.cameras)} is '
                                   'needed')
        return named

    def _image(self, name: str, picture: np.ndarray) -> torch.Tensor:
        try:
            return to_image(picture, self.size, self.bar, self.antialiased)
        except ObservationError as error:
            raise ObservationError(f'camera {name!r}: {error}') from error
