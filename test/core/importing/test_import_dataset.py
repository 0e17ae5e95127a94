# SPDX-License-Identifier: Apache-2.0
"""A LeRobotDataset v3 becomes the library that our own recording of the same calls becomes; what is broken is named."""

from __future__ import annotations

import json
import re

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from recorded_sources import write_dataset, write_video
from tiny_policy import JOINTS

from rmuscle_core.errors import EpisodeError
from rmuscle_core.importing.episodes import Wanted
from rmuscle_core.importing.lerobot import LeRobotDataset
from rmuscle_core.importing.video import read_frames

FPS, STEPS = 20, 4


@pytest.mark.parametrize('pictures', ['video', 'image'])
def test_a_dataset_becomes_the_same_library_bit_by_bit(episodes, build, contents, direct, tmp_path, pictures):
    root = write_dataset(tmp_path / 'my dataset', episodes, FPS, pictures)
    code, library = build(root)
    assert code == 0 and contents(library) == direct
    assert sorted(path.name for path in library.glob('*/*.h5')) == [f'my-dataset-{n:06d}.h5' for n in range(3)]


def test_a_second_build_adds_only_what_is_missing(episodes, build, contents, direct, tmp_path, capsys):
    root = write_dataset(tmp_path / 'dataset', episodes, FPS)
    code, library = build(root)
    (library / 'fold-it/dataset-000002.h5').unlink()
    capsys.readouterr()
    before = {path: path.stat().st_mtime_ns for path in library.glob('*/*.h5')}
    code, _ = build(root)
    assert code == 0 and contents(library) == direct
    assert '1 episodes added' in capsys.readouterr().out
    assert all(path.stat().st_mtime_ns == changed for path, changed in before.items())


def test_success_frame_rate_names_and_prompt(episodes, build, contents, tmp_path):
    root = write_dataset(tmp_path / 'dataset', episodes, FPS, success=[True, False, True])
    info = json.loads((root / 'meta/info.json').read_text())
    info['features']['observation.images.ceiling'] = info['features'].pop('observation.images.base')
    (root / 'meta/info.json').write_text(json.dumps(info))
    (root / 'videos/observation.images.base').rename(root / 'videos/observation.images.ceiling')
    table = pq.read_table(root / 'meta/episodes/chunk-000/file-000.parquet')
    pq.write_table(table.rename_columns([n.replace('.base/', '.ceiling/') for n in table.column_names]),
                   root / 'meta/episodes/chunk-000/file-000.parquet')
    code, library = build(root, 'library', '--camera', 'base=ceiling', '--prompt', 'another task',
                          '--control-rate-hz', 10)
    assert code == 0
    assert [(task, success, len(calls)) for task, success, calls in contents(library)] == \
        [('another-task', True, 3), ('another-task', False, 2), ('another-task', True, 2)]


def test_a_camera_the_checkpoint_has_must_be_there_or_masked(episodes, build, contents, tmp_path, capsys):
    seen = [[type(o)({'wrist': o.images['wrist']}, o.state, o.prompt, o.stamp_s) for o in e] for e in episodes[:1]]
    root = write_dataset(tmp_path / 'dataset', seen, FPS)
    code, library = build(root)
    assert code == 2 and not library.exists()
    assert "no camera 'base' for the checkpoint's base (its cameras: wrist)" in capsys.readouterr().err
    code, library = build(root, 'library', '--masked-camera', 'base')
    assert code == 0 and contents(library)[0][2][0][0] == ('wrist',)


def test_a_lossy_video_keeps_the_picture_to_a_few_levels(episodes, tmp_path):
    """LeRobot's default codec is AV1 with halved colour resolution. Equal bits cannot be asked of it."""
    if 'libsvtav1' not in av.codecs_available:
        pytest.skip('this FFmpeg cannot write AV1')
    pictures = [o.images['base'].repeat(4, 0).repeat(4, 1) for o in episodes[0]]
    path = tmp_path / 'lossy.mp4'
    write_video(path, pictures, FPS, 'libsvtav1', 'yuv420p', {'crf': '30', 'g': '2'})
    for read, shown in zip(read_frames(path, [0.0, 5 / FPS, 17 / FPS], 1e-4), [pictures[i] for i in (0, 5, 17)]):
        difference = np.abs(read.astype(int) - shown)
        assert difference.mean() < 4 and difference.max() < 64


def wanted(**changes):
    return Wanted(**{'cameras': ('base', 'wrist'), 'state_dim': JOINTS, 'execute_steps': STEPS, **changes})


def edit(root, path='data/chunk-000/file-000.parquet', **columns):
    """Replace columns of a table, or drop them (None)."""
    table = pq.read_table(root / path)
    for name, change in columns.items():
        name = name.replace('__', '.')
        at = table.column_names.index(name)
        table = table.remove_column(at) if change is None else table.set_column(at, name, change(table[name]))
    pq.write_table(table, root / path)


def test_frames_are_found_by_frame_rate_and_order_does_not_matter(episodes, tmp_path):
    root = write_dataset(tmp_path / 'dataset', episodes, FPS)
    table = pq.read_table(root / 'data/chunk-000/file-000.parquet')
    pq.write_table(table.take(pa.array(np.random.default_rng(0).permutation(len(table)))),
                   root / 'data/chunk-000/file-000.parquet')
    for pending, episode in zip(LeRobotDataset(root, wanted()), episodes, strict=True):
        read = pending.read().observations
        assert [o.prompt for o in read] == [pending.prompt] * len(read)
        for one, other in zip(read, episode[::STEPS], strict=True):
            assert np.array_equal(one.state, other.state) and one.stamp_s == pytest.approx(other.stamp_s, abs=1e-6)
            assert all(np.array_equal(one.images[c], other.images[c]) for c in other.images)


DAMAGE = {
    'no column': (lambda root: edit(root, observation__state=None), 'observation.state'),
    'shape of another robot': (lambda root: edit(root, observation__state=lambda c: pa.array([[0.0]] * len(c))),
                               r'must have 5 values'),
    'ragged states': (lambda root: edit(root, observation__state=lambda c: pa.array(
        [[0.0] * (i % 3) for i in range(len(c))])), 'inhomogeneous'),
    'nan': (lambda root: edit(root, observation__state=lambda c: pa.array([[float('nan')] * JOINTS] * len(c))),
            'state dimension 0 is nan'),
    'drifting stamps': (lambda root: edit(root, timestamp=lambda c: pa.array(c.to_numpy() * 1.1)),
                        r'frame 1 is stamped 0.0550 s, expected 0.0500 s at 20 frames per second'),
    'nan stamps': (lambda root: edit(root, timestamp=lambda c: pa.array(c.to_numpy() * np.nan)),
                   'frame 0 is stamped nan'),
    'frame twice': (lambda root: edit(root, frame_index=lambda c: pa.array([0] * len(c))), 'missing or twice'),
    'fewer frames than said': (lambda root: edit(root, episode_index=lambda c: pa.array([5] * len(c))),
                               'has 0 frames, its metadata says 18'),
    'no such task': (lambda root: edit(root, task_index=lambda c: pa.array([77] * len(c))), 'it has no 77'),
    'no data file': (lambda root: (root / 'data/chunk-000/file-000.parquet').unlink(), 'No such file'),
    'data cut off': (lambda root: cut(root / 'data/chunk-000/file-000.parquet'), 'episode 0 of'),
    'no video': (lambda root: video(root).unlink(), 'No such file'),
    'video cut off': (lambda root: cut(video(root)), 'cannot be decoded'),
    'video too short': (lambda root: write_video(video(root), [np.zeros((32, 32, 3), np.uint8)] * 5, FPS),
                        r'has no frame at 0.4000 s .* shows one at 0.2000 s instead'),
    'video of another rate': (lambda root: write_video(video(root), [np.zeros((32, 32, 3), np.uint8)] * 90, 7),
                              r'has no frame at 0.2000 s'),
}


def video(root):
    return root / 'videos/observation.images.wrist/chunk-000/file-000.mp4'


def cut(path):
    path.write_bytes(path.read_bytes()[:-200])


@pytest.mark.parametrize(('damage', 'reason'), DAMAGE.values(), ids=DAMAGE)
def test_a_broken_episode_is_skipped_with_the_reason(episodes, build, tmp_path, capsys, damage, reason):
    root = write_dataset(tmp_path / 'dataset', episodes[:1], FPS)
    damage(root)
    code, library = build(root)
    out = capsys.readouterr().out
    assert code == 1 and '0 episodes added' in out and '1 skipped:\n  dataset-000000: ' in out
    assert re.search(reason, out), out
    assert not list(library.glob('*/*.h5'))


def test_the_other_episodes_are_unharmed(episodes, build, contents, direct, tmp_path):
    root = write_dataset(tmp_path / 'dataset', episodes, FPS)
    edit(root, timestamp=lambda c: pa.array([*c.to_pylist()[:-1], 99.0]))
    code, library = build(root)
    assert code == 1 and contents(library) == [direct[0], direct[1]]


@pytest.mark.parametrize(('change', 'sentence'), [
    ({'codebase_version': 'v2.1'}, r'version v2\.1, expected v3\.0; .*convert_dataset_v21_to_v30'),
    ({'codebase_version': 'v4.0'}, r'version v4\.0, expected v3\.0'), ({'fps': 0}, 'fps is 0'),
    ({'fps': None}, 'laid out in another way'), ({'features': None}, 'laid out in another way'),
    ({'features': {}}, r'observation.state .* has shape \[\]')])
def test_a_dataset_of_another_kind_is_refused_as_a_whole(episodes, tmp_path, change, sentence):
    root = write_dataset(tmp_path / 'dataset', episodes[:1], FPS)
    info = json.loads((root / 'meta/info.json').read_text())
    (root / 'meta/info.json').write_text(json.dumps({**info, **change}))
    with pytest.raises(EpisodeError, match=sentence):
        LeRobotDataset(root, wanted())


@pytest.mark.parametrize('file', ['meta/tasks.parquet', 'meta/episodes/chunk-000/file-000.parquet', 'meta/info.json'])
def test_damaged_metadata_is_refused_by_its_name(episodes, tmp_path, file):
    root = write_dataset(tmp_path / 'dataset', episodes[:1], FPS)
    cut(root / file)
    with pytest.raises(EpisodeError, match=file):
        LeRobotDataset(root, wanted())
