# SPDX-License-Identifier: Apache-2.0
"""Encodings left to cv_bridge. It has no wheel, so a stand-in with its signature is asked where it does not import."""

import numpy as np
import pytest
from sensor_msgs.msg import Image

from rmuscle_core.errors import ObservationError
from rmuscle_core.sensing.image import decode_image
from rmuscle_ros import bridge


class Bridge:
    def imgmsg_to_cv2(self, message, desired_encoding):
        assert desired_encoding == 'rgb8'
        if message.encoding == 'broken':
            raise ValueError('no such conversion')
        return np.full((message.height, message.width, 3), 7, np.uint8)


@pytest.fixture
def convert(monkeypatch):
    monkeypatch.setattr(bridge, 'CvBridge', Bridge)
    monkeypatch.setattr(bridge, 'CvBridgeError', TypeError, raising=False)
    return bridge.other_encodings()


def image(encoding):
    return Image(height=2, width=3, encoding=encoding, step=3, data=bytes(6))


def test_unknown_colours_are_asked_for(convert):
    picture = decode_image(image('yuv444'), '/cam', convert)
    assert picture.shape == (2, 3, 3) and (picture == 7).all()


def test_known_encodings_are_never_asked_for(convert):
    assert (decode_image(image('mono8'), '/cam', convert) == 0).all()


@pytest.mark.parametrize('encoding', ['16UC1', 'mono16', '32FC1', 'bayer_rggb16'])
def test_depth_is_refused_all_the_same(convert, encoding):
    with pytest.raises(ObservationError, match='no 8-bit picture'):
        decode_image(image(encoding), '/cam', convert)


def test_what_it_cannot_convert_is_named(convert):
    with pytest.raises(ObservationError, match=r"/cam: cv_bridge cannot convert encoding 'broken'"):
        decode_image(image('broken'), '/cam', convert)


def test_without_it_the_encoding_is_refused(monkeypatch):
    monkeypatch.setattr(bridge, 'CvBridge', None)
    assert bridge.other_encodings() is None
    with pytest.raises(ObservationError, match="'yuv444'"):
        decode_image(image('yuv444'), '/cam', bridge.other_encodings())
