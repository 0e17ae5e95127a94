# SPDX-License-Identifier: Apache-2.0
"""Single pictures of a video file, found by their presentation time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import av
import numpy as np

from rmuscle_core.errors import EpisodeError, reason


def read_frames(path: Path, times_s: Sequence[float], tolerance_s: float) -> list[np.ndarray]:
    """The frames shown at ``times_s`` (ascending, seconds), uint8 [h, w, 3] RGB each.

    A frame further than tolerance_s from its time is another one: EpisodeError, naming both times. Colours are
    converted by FFmpeg as the stream says; an RGB stream without loss comes back bit by bit.
    """
    frames: list[np.ndarray] = []
    last_s = None
    try:
        with av.open(str(path)) as container:
            for last_s, frame in _decoded(container, times_s[0] - tolerance_s):
                if last_s < times_s[len(frames)] - tolerance_s:
                    continue
                while len(frames) < len(times_s) and abs(last_s - times_s[len(frames)]) <= tolerance_s:
                    frames.append(frame.to_ndarray(format='rgb24'))
                if len(frames) == len(times_s):
                    return frames
                if last_s > times_s[len(frames)] + tolerance_s:
                    break
    except (av.FFmpegError, OSError, ValueError) as error:
        raise EpisodeError(f'video {path} cannot be decoded ({reason(error)}); fetch or record it again') from error
    shown = 'is empty' if last_s is None else f'shows one at {last_s:.4f} s instead'
    raise EpisodeError(f'video {path} has no frame at {times_s[len(frames)]:.4f} s (tolerance {tolerance_s:g} s) and '
                       f'{shown}; its length or frame rate is not what the dataset says')


def _decoded(container: av.container.InputContainer, start_s: float) -> Iterator[tuple[float, av.VideoFrame]]:
    """Frames with their times from the last key frame before ``start_s`` on."""
    if not container.streams.video:
        raise ValueError('it has no video stream')
    stream = container.streams.video[0]
    container.seek(max(0, int(start_s / stream.time_base)), stream=stream)
    for frame in container.decode(stream):
        if frame.pts is not None:
            yield float(frame.pts * stream.time_base), frame
