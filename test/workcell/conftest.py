# SPDX-License-Identifier: Apache-2.0
"""One simulated cell for all tests, and a small demonstration file that needs no simulator."""

from __future__ import annotations

import numpy as np
import pytest

from rmuscle_core.workcell.dataset import Demonstrations

JOINT_COUNT = 14


@pytest.fixture(scope='session')
def cell():
    made_by = pytest.importorskip('rmuscle_core.workcell.cell', reason='the extra "workcell" is not installed',
                                  exc_type=ModuleNotFoundError)

    try:
        made = made_by.WorkCell()
    except Exception as error:  # noqa: BLE001 - every GL backend fails with a type of its own
        pytest.skip(f'no off-screen rendering on this machine ({error}); install libosmesa6')
    yield made
    made.close()


@pytest.fixture(scope='session')
def demonstrations() -> Demonstrations:
    """Random frames in the right format: 16 episodes of 4 frames and 30 still frames, 16 pixels."""
    draw = np.random.default_rng(0)
    episodes, frames, still = 16, 64, 30

    def pixels(count: int) -> np.ndarray:
        return draw.integers(0, 256, (count, 3, 16, 16, 3), dtype=np.uint8)

    return Demonstrations(
        cameras=np.array(['top', 'left_wrist', 'right_wrist']), joints=np.array([f'j{i}' for i in range(JOINT_COUNT)]),
        control_rate=np.array(25.0), task=np.array('transfer cube'), images=pixels(frames),
        states=draw.normal(size=(frames, JOINT_COUNT)).astype(np.float32),
        landmarks=draw.uniform(0, 0.5, (frames, 2)).astype(np.float32),
        episodes=np.repeat(np.arange(episodes, dtype=np.int32), 4),
        steps=np.tile(np.array([0, 6, 12, 18], np.int32), episodes),
        commands=draw.normal(size=(episodes, 24, JOINT_COUNT)).astype(np.float32), located_images=pixels(still),
        located_states=draw.normal(size=(still, JOINT_COUNT)).astype(np.float32),
        located_landmarks=draw.uniform(0, 0.5, (still, 2)).astype(np.float32))
