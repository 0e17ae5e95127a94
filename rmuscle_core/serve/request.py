# SPDX-License-Identifier: Apache-2.0
"""From a request's keys to the policy's inputs: which key holds which camera, the state and the prompt.

Requests of openpi's environments are flat (``observation/image``), nested (``images`` of ALOHA) or named as in LeRobot
(``observation.images.top``); nested maps are read as if their names were joined by ``/``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rmuscle_core.errors import ObservationError, SettingsError
from rmuscle_core.observation import Observation

# what openpi's LIBERO, DROID and ALOHA environments send for the cameras that its checkpoints have
OPENPI_CAMERAS = {
    'base_0_rgb': ('observation/image', 'observation/exterior_image_1_left', 'images/cam_high'),
    'left_wrist_0_rgb': ('observation/wrist_image', 'observation/wrist_image_left', 'images/cam_left_wrist'),
    'right_wrist_0_rgb': ('images/cam_right_wrist',),
}
STATES = (('observation/state',), ('state',), ('observation.state',),
          ('observation/joint_position', 'observation/gripper_position'))
PROMPTS = ('prompt', 'task')
_PLACES = ('observation/{}', 'images/{}', 'observation/images/{}', 'observation.images.{}', '{}')
_DEPTH = 4


@dataclass(frozen=True)
class RequestMap:
    """Keys tried for each input, in order. states: each a tuple of keys whose values are joined to one state."""

    cameras: Mapping[str, tuple[str, ...]]
    states: tuple[tuple[str, ...], ...] = STATES
    prompt: str = ''  # for requests without one

    @classmethod
    def build(cls, cameras: Sequence[str], given: Mapping[str, str] | None = None, state_keys: Sequence[str] = (),
              prompt: str = '') -> RequestMap:
        """cameras: the policy's. given: camera -> the one key that holds it; the others go by the known names.

        Raises SettingsError for a camera the policy does not have.
        """
        given = given or {}
        unknown = sorted(set(given) - set(cameras))
        if unknown:
            raise SettingsError(f'camera {unknown[0]!r} is not one of the policy ({", ".join(cameras)}); map those')
        keys = {camera: (given[camera],) if camera in given else
                (*(place.format(camera) for place in _PLACES), *OPENPI_CAMERAS.get(camera, ())) for camera in cameras}
        return cls(keys, (tuple(state_keys),) if state_keys else STATES, prompt)

    def observation(self, request: Mapping[str, Any]) -> Observation:
        """Read a request, ignoring keys nobody asked for; ObservationError names the key that is missing or wrong."""
        values = dict(_flatten(request))
        images = {camera: self._picture(values, camera) for camera in self.cameras}
        return Observation(images, self._state(values), self._text(values))

    def _picture(self, values: Mapping[str, Any], camera: str) -> np.ndarray:
        key = next((key for key in self.cameras[camera] if key in values), None)
        if key is None:
            raise ObservationError(f'the request has no picture for camera {camera} under '
                                   f'{_listed(self.cameras[camera])} (its keys: {_listed(values)}); send it, or start '
                                   f'rmuscle serve with --camera {camera}=KEY, or with --masked-camera {camera} if the '
                                   'robot has none')
        picture = values[key]
        if not isinstance(picture, np.ndarray) or picture.dtype != np.uint8 or picture.ndim != 3 or \
                3 not in (picture.shape[2], picture.shape[0]):
            found = f'{picture.dtype} {list(picture.shape)}' if isinstance(picture, np.ndarray) else \
                type(picture).__name__
            raise ObservationError(f'{key} must be uint8 [height, width, 3] or [3, height, width] RGB, not {found}; '
                                   'convert it in the client')
        return np.array(picture if picture.shape[2] == 3 else picture.transpose(1, 2, 0))  # of its own, not the frame's

    def _state(self, values: Mapping[str, Any]) -> np.ndarray:
        keys = next((keys for keys in self.states if all(key in values for key in keys)), None)
        if keys is None:
            wanted = ' or '.join(' with '.join(keys) for keys in self.states)
            raise ObservationError(f'the request has no robot state under {wanted} (its keys: {_listed(values)}); send '
                                   'it, or start rmuscle serve with --state-key KEY')
        try:
            with np.errstate(over='ignore'):  # the processor refuses what is not finite
                return np.concatenate([np.atleast_1d(np.asarray(values[key], np.float32)) for key in keys])
        except (TypeError, ValueError, OverflowError) as error:
            raise ObservationError(f'{" with ".join(keys)} must be a list of numbers ({error}); correct it in the '
                                   'client') from error

    def _text(self, values: Mapping[str, Any]) -> str:
        prompt = next((values[key] for key in PROMPTS if key in values), self.prompt)
        if not isinstance(prompt, str) or not prompt.strip():
            raise ObservationError(f'the request has no text under {_listed(PROMPTS)}; send the instruction, or start '
                                   'rmuscle serve with --prompt')
        return prompt


def _flatten(request: Mapping[Any, Any], prefix: str = '', depth: int = 0) -> Iterator[tuple[str, Any]]:
    if depth == _DEPTH:
        raise ObservationError(f'the request is nested more than {_DEPTH} deep at {prefix[:60]!r}; send a flat map')
    for key, value in request.items():
        if not isinstance(key, str):
            raise ObservationError(f'the request has the key {str(key)[:40]!r}, expected names; see docs/serving.md')
        if isinstance(value, Mapping):
            yield from _flatten(value, f'{prefix}{key}/', depth + 1)
        else:
            yield f'{prefix}{key}', value


def _listed(keys: Any) -> str:
    names = [str(key)[:60] for key in keys]
    return ', '.join(names[:12]) + (f' and {len(names) - 12} more' if len(names) > 12 else '') or 'none'
