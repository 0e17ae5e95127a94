# SPDX-License-Identifier: Apache-2.0
"""ROS 2 bags become the library that our own recording of the same calls becomes; what is broken is named."""

from __future__ import annotations

import re
import sqlite3
from dataclasses import replace

import numpy as np
import pytest
from recorded_sources import START_NS, compressed, header, image, joint_state, messages_of, text, write_bag
from rosbags.rosbag2 import StoragePlugin
from tiny_policy import CAMERAS, JOINTS

from rmuscle_core.bench import report
from rmuscle_core.errors import SettingsError
from rmuscle_core.importing.bag import Bags
from rmuscle_core.importing.bag_file import Topics
from rmuscle_core.importing.episodes import Wanted
from rmuscle_core.importing.robot import read_robot, read_settings
from rmuscle_core.library.recording import RecordedEpisode, write_recording

STEPS, FPS = 4, 20
NAMES = tuple(f'joint{number}' for number in range(JOINTS))
SECOND = 10**9


def wanted(**changes):
    return Wanted(**{'cameras': CAMERAS, 'state_dim': JOINTS, 'execute_steps': STEPS, **changes})


def read(path, parameters, topics=None, **changes):
    """Every episode of bags, by name."""
    found = Bags([path], wanted(**changes), read_robot(parameters), topics or Topics())
    return {pending.name: pending.read().observations for pending in found}


def same(observations, expected):
    for one, other in zip(observations, expected, strict=True):
        assert one.prompt == other.prompt and np.array_equal(one.state, other.state)
        assert all(np.array_equal(one.images[c], other.images[c]) for c in other.images)


@pytest.mark.parametrize(('storage', 'picture'), [
    (StoragePlugin.MCAP, image), (StoragePlugin.MCAP, compressed), (StoragePlugin.SQLITE3, image)],
    ids=['mcap', 'mcap, compressed pictures', 'sqlite3'])
def test_bags_become_the_same_library_bit_by_bit(episodes, build, contents, direct, tmp_path, parameters, storage,
                                                 picture):
    (tmp_path / 'bags').mkdir()
    for number, episode in enumerate(episodes):
        write_bag(tmp_path / f'bags/episode_{number}', messages_of(episode, NAMES, picture_message=picture), storage)
    code, library = build(tmp_path / 'bags', 'library', '--parameters', parameters)
    assert code == 0 and contents(library) == direct
    assert sorted(path.name for path in library.glob('*/*.h5')) == [f'episode_{n}.h5' for n in range(3)]
    before = [path.stat().st_mtime_ns for path in library.glob('*/*.h5')]
    assert build(tmp_path / 'bags', 'library', '--parameters', parameters)[0] == 0
    assert [path.stat().st_mtime_ns for path in library.glob('*/*.h5')] == before


def test_one_file_without_its_folder(episodes, tmp_path, parameters):
    bag = write_bag(tmp_path / 'bag', messages_of(episodes[0], NAMES))
    same(read(next(bag.glob('*.mcap')), parameters)['bag'], episodes[0][::STEPS])


def test_header_time_decides_not_recording_time(episodes, tmp_path, parameters):
    """The wrist camera's pictures reach the recorder 0.4 s late, and two frames in the wrong order."""
    late = [(topic, message, time_ns + (400_000_000 if topic.startswith('/wrist') else 0))
            for topic, message, time_ns in messages_of(episodes[0], NAMES)]
    at = [n for n, row in enumerate(late) if row[0] == '/base/image_raw'][4:6]
    late[at[0]], late[at[1]] = (*late[at[1]][:2], late[at[0]][2]), (*late[at[0]][:2], late[at[1]][2])
    bag = write_bag(tmp_path / 'bag', sorted(late, key=lambda row: row[2]))
    same(read(bag, parameters)['bag'], episodes[0][::STEPS])


def test_faster_joints_and_a_jittering_camera(episodes, tmp_path, parameters):
    """Joints at five times the rate; frames up to 2 ms early or late do not shift the calls by a whole frame."""
    jitter = np.random.default_rng(0).uniform(-2e-3, 2e-3, len(episodes[0]))
    shifted = [replace(o, stamp_s=o.stamp_s + dt) for o, dt in zip(episodes[0], jitter)]
    pictures = [row for row in messages_of(shifted, NAMES) if row[0].endswith('image_raw')]
    joints = [('/joint_states', joint_state(NAMES, [n / 1000] * JOINTS, START_NS + n * 10_000_000),
               START_NS + n * 10_000_000) for n in range(100)]
    bag = write_bag(tmp_path / 'bag', sorted([*pictures, *joints], key=lambda row: row[2]))
    seen = read(bag, parameters, prompt='go')['bag']
    assert len(seen) == 5
    for observation, expected in zip(seen, episodes[0][::STEPS], strict=True):
        assert all(np.array_equal(observation.images[c], expected.images[c]) for c in CAMERAS)


def test_units_split_joint_publishers_and_namespaces(episodes, tmp_path, parameters):
    parameters.write_text(parameters.read_text() + '    joint_units: [deg]\n    joint_offset: [0.5]\n')
    degrees = [replace(o, state=o.state * 40) for o in episodes[0]]
    robot = [replace(o, state=np.deg2rad(o.state.astype(np.float64)) + 0.5) for o in degrees]
    rows = []
    for topic, message, time_ns in messages_of(robot, NAMES, namespace='/cell/left'):
        if topic.endswith('joint_states'):
            for part in (slice(2, None), slice(0, 2)):
                split = joint_state(message.name[part], message.position[part], 0)
                rows.append((topic, replace(split, header=message.header), time_ns))
        else:
            rows.append((topic, message, time_ns))
    seen = read(write_bag(tmp_path / 'bag', rows), parameters)['bag']
    for observation, expected in zip(seen, degrees[::STEPS], strict=True):
        assert np.allclose(observation.state, expected.state, atol=1e-4)


def test_two_robots_in_one_bag_must_be_told_apart(episodes, tmp_path, parameters):
    rows = [row for side in ('left', 'right') for row in messages_of(episodes[0], NAMES, namespace=f'/{side}')]
    bag = write_bag(tmp_path / 'bag', sorted(rows, key=lambda row: row[2]))
    with pytest.raises(SettingsError, match='/left/joint_states and /right/joint_states; choose one with --topic'):
        read(bag, parameters)
    names = ('joint_states', 'prompt', *(f'{camera}/image_raw' for camera in CAMERAS))
    same(read(bag, parameters, Topics({name: f'/right/{name}' for name in names}))['bag'], episodes[0][::STEPS])


def divided(episodes, gap_s=3.0, marker=None):
    """The episodes one after the other in time, each announced on a topic, the last minute of idling in front."""
    rows, start_ns = messages_of(episodes[0], NAMES, START_NS - 60 * SECOND), START_NS
    for episode in episodes:
        rows += [*([(marker, text('begin'), start_ns - 1)] if marker else []), *messages_of(episode, NAMES, start_ns)]
        start_ns += round((episode[-1].stamp_s + gap_s) * SECOND)
    return sorted(rows, key=lambda row: row[2])


def test_a_topic_divides_a_bag_into_episodes(episodes, tmp_path, parameters):
    bag = write_bag(tmp_path / 'bag', divided(episodes, marker='/episodes'))
    found = read(bag, parameters, Topics(episodes='/episodes'))
    assert list(found) == ['bag-000', 'bag-001', 'bag-002']
    for observations, expected in zip(found.values(), episodes, strict=True):
        same(observations, expected[::STEPS])


def test_v11_a_clock_that_jumps_back_begins_an_episode(episodes, tmp_path, parameters):
    """A simulation that starts again at zero: no picture of the run before counts in the next one."""
    rows, recorded_ns = [], START_NS
    for episode in episodes[:2]:
        later = [replace(o, stamp_s=o.stamp_s + 10 if episode is episodes[0] else o.stamp_s + 1) for o in episode]
        rows += [(topic, message, recorded_ns + time_ns) for topic, message, time_ns in messages_of(later, NAMES, 0)]
        recorded_ns += 60 * SECOND
    found = read(write_bag(tmp_path / 'bag', rows), parameters)
    same(found['bag-000'], episodes[0][::STEPS])
    same(found['bag-001'], episodes[1][::STEPS])


def without(topic):
    return lambda rows: [row for row in rows if row[0] != topic]


def changed(topic, change):
    return lambda rows: [(t, change(m) if t == topic else m, time_ns) for t, m, time_ns in rows]


@pytest.mark.parametrize(('damage', 'reason'), [
    (without('/wrist/image_raw'), 'has no topic wrist/image_raw'),
    (without('/joint_states'), 'has no topic joint_states'),
    (without('/prompt'), 'has no prompt'), (lambda rows: rows[:1] + rows[-1:], 'has no topic'),
    (changed('/joint_states', lambda m: replace(m, position=m.position * np.nan)), 'no position yet .* for joint0'),
    (changed('/joint_states', lambda m: replace(m, name=['other'] * JOINTS)), 'no position yet .* for joint0'),
    (changed('/joint_states', lambda m: replace(m, position=m.position[:2])), '2 positions for 5 names'),
    (changed('/wrist/image_raw', lambda m: replace(m, data=m.data[:-5])), r'/wrist/image_raw: \d+ bytes do not make'),
    (changed('/wrist/image_raw', lambda m: replace(m, encoding='16UC1')), 'encoding .16UC1. is no 8-bit picture'),
    (changed('/wrist/image_raw', lambda m: replace(m, header=header(7 * SECOND))), 's old, max_age_s'),
], ids=['no camera', 'no joints', 'no prompt', 'hardly anything', 'nan positions', 'other joints', 'unpaired joints',
        'short pictures', 'depth pictures', 'pictures of another clock'])
def test_a_bag_without_a_usable_instant_is_skipped_with_the_reason(episodes, build, tmp_path, parameters, capsys,
                                                                   damage, reason):
    write_bag(tmp_path / 'bag', damage(messages_of(episodes[0], NAMES)))
    code, library = build(tmp_path / 'bag', 'library', '--parameters', parameters)
    skipped = capsys.readouterr().out.partition('1 skipped:\n  bag: ')[2]
    assert code == 1 and not list(library.glob('*/*.h5'))
    assert re.search(reason, skipped), skipped


def test_one_broken_frame_costs_nothing_but_itself(episodes, tmp_path, parameters):
    rows = messages_of(episodes[0], NAMES)
    at = next(n for n, row in enumerate(rows) if row[0] == '/wrist/image_raw' and n > 20)
    rows[at] = (rows[at][0], replace(rows[at][1], data=rows[at][1].data[:7]), rows[at][2])
    assert len(read(write_bag(tmp_path / 'bag', rows), parameters)['bag']) == 5


def unfinished(bag):
    path = next(bag.glob('*.mcap'))
    path.write_bytes(path.read_bytes()[:-500])


def half(bag):
    path = next(bag.glob('*.mcap'))
    content = bytearray(path.read_bytes())
    content[1000:3000] = bytes(2000)
    path.write_bytes(content)


@pytest.mark.parametrize('damage', [unfinished, half, lambda bag: (bag / 'metadata.yaml').write_text('a: ['),
                                    lambda bag: next(bag.glob('*.mcap')).unlink(),
                                    lambda bag: next(bag.glob('*.mcap')).write_bytes(b'')],
                         ids=['unfinished', 'overwritten', 'metadata', 'no file', 'empty file'])
def test_a_damaged_bag_is_skipped_with_the_way_to_repair_it_and_costs_no_other(
        episodes, build, contents, direct, tmp_path, parameters, capsys, damage):
    (tmp_path / 'bags').mkdir()
    for number, episode in enumerate(episodes):
        write_bag(tmp_path / f'bags/episode_{number}', messages_of(episode, NAMES))
    damage(tmp_path / 'bags/episode_1')
    code, library = build(tmp_path / 'bags', 'library', '--parameters', parameters)
    assert code == 1 and contents(library) == direct[:2]
    out = capsys.readouterr().out
    assert '1 skipped' in out and 'episode_1 cannot be read' in out and 'mcap recover' in out


def test_a_damaged_sqlite3_bag(episodes, build, tmp_path, parameters, capsys):
    bag = write_bag(tmp_path / 'bag', messages_of(episodes[0], NAMES), StoragePlugin.SQLITE3)
    with sqlite3.connect(next(bag.glob('*.db3'))) as database:
        database.execute('DROP TABLE messages')
    code, library = build(bag, 'library', '--parameters', parameters)
    assert code == 3 and not library.exists()
    assert 'bag cannot be read' in capsys.readouterr().err


@pytest.mark.parametrize(('options', 'sentence'), [
    ([], 'is a bag: give the parameter file'), (['--parameters', 'nowhere.yaml'], 'nowhere.yaml is no ROS parameter'),
    (['--topic', 'joint_states'], 'must be two names'), (['--control-rate-hz', '-1'], 'above 0')])
def test_options_that_do_not_fit_are_refused(episodes, build, tmp_path, capsys, options, sentence):
    bag = write_bag(tmp_path / 'bag', messages_of(episodes[0], NAMES))
    code, library = build(bag, 'library', *options)
    assert code == 2 and sentence in capsys.readouterr().err and not library.exists()


@pytest.mark.parametrize(('options', 'sentence'), [
    (['--topic', 'nowhere=/x'], '--topic nowhere names nothing that is read'),
    (['--masked-camera', 'nose'], "'nose' is not a camera of the checkpoint"),
    (['--camera', 'nose=x'], "'nose' is not a camera of the checkpoint"),
    (['--camera', 'base=x'], "has no camera 'x'"),
    (['--camera', 'base=x', '--camera', 'base=y'], 'gives a name twice'),
    (['--execute-steps', '9'], 'expected 1 to 8')])
def test_a_value_that_does_not_fit_is_refused(episodes, build, tmp_path, parameters, capsys, options, sentence):
    bag = write_bag(tmp_path / 'bag', messages_of(episodes[0], NAMES))
    code, library = build(bag, 'library', '--parameters', parameters, *options)
    assert code == 2 and sentence in capsys.readouterr().err and not library.exists()


@pytest.mark.parametrize(('line', 'sentence'), [
    ('control_rate_hz: fast', 'control_rate_hz must be a number'), ('max_age_s: 0.0', 'must be above 0'),
    ('max_skew_s: -1.0', 'max_skew_s at least 0'), ('joint_names: arm', 'joint_names must be a list'),
    ('joint_names: [1, 2]', 'joint_names must be text'), ('joint_units: [mile]', 'joint_units must hold'),
    ('image_topics: {base: 3}', 'image_topics.base must be text'),
    ('masked_cameras: [base, wrist]', 'sets no cameras')])
def test_a_wrong_line_of_the_parameter_file_is_named_with_the_file(episodes, build, tmp_path, parameters, capsys, line,
                                                                   sentence):
    bag = write_bag(tmp_path / 'bag', messages_of(episodes[0], NAMES))
    parameters.write_text(f'{parameters.read_text()}    {line}\n')  # the last of two equal keys counts
    code, library = build(bag, 'library', '--parameters', parameters)
    error = capsys.readouterr().err
    assert code == 2 and f'rmuscle: {parameters}' in error and sentence in error and not library.exists()


@pytest.mark.parametrize('value', [-1, 9])
def test_steps_of_the_parameter_file_must_fit_into_a_chunk(episodes, build, tmp_path, parameters, capsys, value):
    bag = write_bag(tmp_path / 'bag', messages_of(episodes[0], NAMES))
    parameters.write_text(f'{parameters.read_text()}    execute_steps: {value}\n')
    assert build(bag, 'library', '--parameters', parameters)[0] == 2
    assert f'execute_steps is {value}, expected 1 to 8' in capsys.readouterr().err


def test_a_setting_of_the_parameter_file_is_checked_with_its_name(parameters):
    parameters.write_text(f'{parameters.read_text()}    token_ratio: 3.0\n')
    with pytest.raises(SettingsError, match=r'robot\.yaml: token_ratio must lie in'):
        read_settings(parameters)


@pytest.mark.parametrize('option', ['--topic', '--camera'])
def test_a_recording_has_the_checkpoints_names(episodes, build, tmp_path, capsys, option):
    write_recording(tmp_path / 'own.h5', [RecordedEpisode('one', True, episodes[0])])
    assert build(tmp_path / 'own.h5', 'library', option, 'base=x')[0] == 2
    assert 'has the names of the checkpoint' in capsys.readouterr().err


def test_progress_counts_the_episodes_of_a_bag(episodes, build, tmp_path, parameters, capsys, monkeypatch):
    monkeypatch.setattr(report, 'EVERY_S', 0.0)
    bag = write_bag(tmp_path / 'bag', divided(episodes, marker='/episodes'))
    assert build(bag, 'library', '--parameters', parameters, '--episodes-topic', '/episodes')[0] == 0
    assert [line.partition(',')[0] for line in capsys.readouterr().err.splitlines()] == [
        f'episodes: {number} of 3' for number in (1, 2, 3)]


def test_an_episodes_topic_that_is_not_there_is_renamed_by_its_own_option(episodes, build, tmp_path, parameters,
                                                                          capsys):
    bag = write_bag(tmp_path / 'bag', messages_of(episodes[0], NAMES))
    assert build(bag, 'library', '--parameters', parameters, '--episodes-topic', '/nowhere')[0] == 1
    assert 'has no topic /nowhere' in (out := capsys.readouterr().out) and '--episodes-topic TOPIC' in out


def test_a_path_without_episodes_is_refused_with_what_is_accepted(build, tmp_path, capsys):
    (tmp_path / 'empty').mkdir()
    assert build(tmp_path / 'empty')[0] == 3
    assert 'holds no episodes; expected a recording' in capsys.readouterr().err
