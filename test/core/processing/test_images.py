# SPDX-License-Identifier: Apache-2.0
"""Resize with pad: aspect ratio kept, bars where LeRobot puts them."""

import numpy as np
import pytest
import torch

from rmuscle_core.errors import ObservationError
from rmuscle_core.processing.images import content_box, to_image


def test_a_square_stays_square_and_the_bars_are_minus_one():
    picture = np.zeros((720, 1280, 3), np.uint8)
    picture[260:460, 540:740] = 255
    image = to_image(picture, 224)
    lit = image[0] > 0
    rows, columns = int(lit.any(1).sum()), int(lit.any(0).sum())
    assert abs(rows / columns - 1) <= 0.03
    picture[:] = 255
    bars = (to_image(picture, 224) == -1).all(0).all(1)
    assert bars[:49].all() and bars[-49:].all() and not bars[49:-49].any()


def test_an_odd_bar_has_its_extra_pixel_at_the_bottom():
    assert content_box(48, 64, 57) == (7, 0, 42, 57)


def test_a_picture_of_the_right_size_is_only_scaled():
    picture = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    image = to_image(picture, 64)
    assert torch.equal(image, torch.from_numpy(picture).permute(2, 0, 1).float() / 255 * 2 - 1)


def test_between_the_bars_one_colour_stays_that_colour():
    picture = np.full((48, 96, 3), (200, 10, 90), np.uint8)
    image, (top, left, rows, columns) = to_image(picture, 64), content_box(48, 96, 64)
    inside = image[:, top:top + rows, left:left + columns]
    torch.testing.assert_close(inside, (torch.tensor([200, 10, 90]) / 127.5 - 1)[:, None, None].expand(3, 32, 64))


def test_the_picture_is_not_aliased():
    picture = np.zeros((64, 64, 3), np.uint8)
    image = to_image(picture, 64)
    picture[:] = 255
    assert (image == -1).all()


@pytest.mark.parametrize('picture', [np.zeros((4, 4, 3), np.float32), np.zeros((4, 4), np.uint8),
                                     np.zeros((4, 4, 4), np.uint8), np.zeros((0, 4, 3), np.uint8),
                                     np.zeros((1, 4000, 3), np.uint8)])
def test_other_pictures_are_refused(picture):
    with pytest.raises(ObservationError):
        to_image(picture, 64)
