# SPDX-License-Identifier: Apache-2.0
"""cv_bridge for the rare encodings that rmuscle_core.sensing.image leaves to others."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from rmuscle_core.errors import ObservationError
from rmuscle_core.sensing.image import Converter

try:
    from cv_bridge import CvBridge, CvBridgeError
except (ImportError, AttributeError):  # AttributeError: built against numpy 1.x, imported under numpy 2
    CvBridge = None

MORE_THAN_8_BIT = re.compile('16|32|64')  # depth and the like: squeezed into 8 bits it would pass for a picture


def other_encodings() -> Converter | None:
    """What converts them, or None where cv_bridge cannot be imported."""
    if CvBridge is None:
        return None
    bridge = CvBridge()

    def convert(message: Any, topic: str) -> np.ndarray | None:
        if MORE_THAN_8_BIT.search(message.encoding):
            return None
        try:
            return np.array(bridge.imgmsg_to_cv2(message, 'rgb8'))
        except (CvBridgeError, ValueError, TypeError) as error:
            raise ObservationError(f'{topic}: cv_bridge cannot convert encoding {message.encoding[:40]!r} to rgb8 '
                                   f'({error}); choose another encoding in the camera driver') from error

    return convert
