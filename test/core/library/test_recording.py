# SPDX-License-Identifier: Apache-2.0
"""Raw recordings come back as they were written."""

import h5py
import numpy as np
import pytest

from rmuscle_core.errors import EpisodeError
from rmuscle_core.library.recording import RecordedEpisode, open_recording, write_recording
from rmuscle_core.observation import Observation


def observations(count, cameras=('top', 'wrist')):
    random = np.random.default_rng(count)
    return [Observation({c: random.integers(0, 256, (12, 16, 3), dtype=np.uint8) for c in cameras},
                        random.normal(size=5).astype(np.float32), 'stack it', 0.5 * i) for i in range(count)]


def test_round_trip(tmp_path):
    written = [RecordedEpisode('one', True, observations(3)), RecordedEpisode('two', False, observations(2, ('top',)))]
    write_recording(tmp_path / 'r.h5', written, joints=('waist', 'gripper'))
    with open_recording(tmp_path / 'r.h5') as recording:
        assert recording.joints == ('waist', 'gripper') and len(recording) == 2
        for read, expected in zip(recording, written, strict=True):
            assert (read.name, read.success) == (expected.name, expected.success)
            for one, other in zip(read.observations, expected.observations, strict=True):
                assert (one.prompt, one.stamp_s, list(one.images)) == (other.prompt, other.stamp_s, list(other.images))
                assert np.array_equal(one.state, other.state) and one.state.dtype == np.float32
                assert all(np.array_equal(one.images[c], other.images[c]) for c in other.images)


def test_an_interrupted_recording_does_not_appear(tmp_path):
    def episodes():
        yield RecordedEpisode('one', True, observations(1))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_recording(tmp_path / 'r.h5', episodes())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize('content', [b'', b'text', None])
def test_another_file_is_refused_by_name(tmp_path, content):
    path = tmp_path / 'r.h5'
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(EpisodeError, match=r'r\.h5'):
        open_recording(path)


def test_a_damaged_episode_is_refused_by_name(tmp_path):
    path = tmp_path / 'r.h5'
    write_recording(path, [RecordedEpisode('one', True, observations(2))])
    with h5py.File(path, 'r+') as file:
        del file['episodes/00000/calls/00001/state']
    with open_recording(path) as recording, pytest.raises(EpisodeError, match=r'r\.h5'):
        list(recording)
