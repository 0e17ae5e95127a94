# SPDX-License-Identifier: Apache-2.0
"""Camera picture to model image: the one resize-with-pad of live, offline and library use, by the checkpoint's rule."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from rmuscle_core.errors import ObservationError


def content_box(height: int, width: int, size: int) -> tuple[int, int, int, int]:
    """Where a picture lands in the square image: (top, left, rows, columns) in model pixels; the rest is bars.

    The aspect ratio is kept and lengths are truncated; an odd bar has its extra pixel at the bottom or right.
    """
    ratio = max(width / size, height / size)
    rows, columns = int(height / ratio), int(width / ratio)
    return (size - rows) // 2, (size - columns) // 2, rows, columns


def to_image(picture: np.ndarray, size: int, bar: float = -1.0, antialiased: bool = False) -> torch.Tensor:
    """Return uint8 [h,w,3] RGB as float32 [3,size,size] in [-1, 1]; ``bar`` is the value of the letterbox bars.

    Bilinear: without antialiasing, as LeRobot does it, or with it on bytes, as openpi does. Raises ObservationError for
    any other dtype or shape.
    """
    if not isinstance(picture, np.ndarray):
        raise ObservationError(f'a camera picture must be a numpy array, not {type(picture).__name__}; convert it '
                               'before the policy call')
    if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3 or 0 in picture.shape:
        raise ObservationError(f'a camera picture must be uint8 [height, width, 3] RGB, not {picture.dtype} '
                               f'{list(picture.shape)}; convert it before the policy call')
    top, left, rows, columns = content_box(*picture.shape[:2], size)
    if 0 in (rows, columns):
        raise ObservationError(f'a picture of {list(picture.shape[:2])} pixels is too thin for a {size}x{size} image; '
                               'crop it before the policy call')
    if antialiased and (rows, columns) != tuple(picture.shape[:2]):
        picture = _resize_bytes(picture, rows, columns)
    pixels = torch.from_numpy(np.ascontiguousarray(picture)).permute(2, 0, 1).to(torch.float32) / 255.0
    if (rows, columns) != tuple(picture.shape[:2]):
        pixels = F.interpolate(pixels[None], size=(rows, columns), mode='bilinear', align_corners=False)[0]
    image = torch.full((3, size, size), bar)
    image[:, top:top + rows, left:left + columns] = pixels.clamp(0.0, 1.0) * 2.0 - 1.0
    return image


def _resize_bytes(picture: np.ndarray, rows: int, columns: int) -> np.ndarray:
    from PIL import Image  # openpi's own rule; nobody else needs the package

    return np.array(Image.fromarray(picture).resize((columns, rows), Image.Resampling.BILINEAR))
