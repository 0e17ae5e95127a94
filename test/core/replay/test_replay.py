# SPDX-License-Identifier: Apache-2.0
"""Recorded executions through the policy twice: what is measured, what the report holds, when it fails."""

import json
import shutil
from html.parser import HTMLParser

import numpy as np
import pytest
from tiny_policy import write_statistics

from rmuscle_core.cli import main
from rmuscle_core.library.recording import RecordedEpisode, write_recording
from rmuscle_core.observation import CallReport
from rmuscle_core.replay import measures
from rmuscle_core.replay.calls import ReplayedCall

NAMES = ['a', 'b', 'c', 'd', 'e']


def replay(recording, checkpoint, *arguments):
    out = recording.parent / 'report'
    code = main(['replay', str(recording), '--checkpoint', str(checkpoint), '--out', str(out), *arguments])
    return code, json.loads((out / 'report.json').read_text()), (out / 'report.html').read_text()


class Page(HTMLParser):
    """Headings, pictures, and every address outside the file."""

    def __init__(self, text):
        super().__init__()
        self.headings, self.images, self.outside, self.open = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        if tag not in ('img', 'meta'):
            self.open.append(tag)
        if tag == 'img':
            self.images.append(values['src'])
        if tag in ('script', 'link', 'iframe'):
            self.outside.append(tag)
        self.outside += [value for name, value in attributes
                         if name in ('src', 'href') and not value.startswith('data:image/png;base64,')]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == 'h2':
            self.headings.append(data)


def test_the_first_half_serves_the_second(recording, tiny_checkpoint, capsys):
    code, found, html = replay(recording, tiny_checkpoint, '--token-ratio', '0.3')
    assert code == 0 and found['episodes'] == 2 and found['calls'] == 6
    assert found['paths'].get('library', 0) >= 4 and found['hit_ratio'] > 0.6
    assert list(found['joints']) == NAMES and found['action_difference']['mean'] > 0
    assert found['skipped'] == [['empty', 'it has no observations']] and 'empty was skipped' in capsys.readouterr().out
    assert found['worst_calls'][0]['difference'] == pytest.approx(found['action_difference']['max'])
    page = Page(html)
    assert page.headings == ['Limits', 'In short', 'Joints', 'Episodes', 'Paths and similarity',
                             'Latency and chunk boundaries', 'Worst calls', 'Made with']
    assert len(page.images) > 3 + 4 * len(found['worst_calls']) and not page.outside and not page.open


def test_everything_recomputed_is_dense(recording, tiny_checkpoint):
    _, found, _ = replay(recording, tiny_checkpoint, '--token-ratio', '1', '--neuron-ratio', '1')
    assert found['action_difference']['max'] == 0 and found['paths'].get('library', 0) > 0
    assert found['boundary_jump']['dense'] == found['boundary_jump']['cached']


GENEROUS = {'--max-action-difference': '9', '--max-boundary-ratio': '9', '--min-hit-ratio': '0', '--min-speedup': '0'}


@pytest.mark.parametrize(('exceeded', 'named'), [
    ({}, ''), ({'--max-action-difference': '0'}, 'action difference, p95 of calls'),
    ({'--max-boundary-ratio': '0'}, 'boundary jump, cached over dense'),
    ({'--min-hit-ratio': '1', '--mode': 'dense'}, 'calls served by a reference'),
    ({'--min-speedup': '1000'}, 'speedup')])
def test_each_limit_decides_the_exit_code(recording, tiny_checkpoint, exceeded, named, capsys):
    limits = [text for option in (GENEROUS | exceeded).items() for text in option]
    code, found, html = replay(recording, tiny_checkpoint, *limits)
    assert [row['name'] for row in found['limits'] if not row['holds']] == ([named] if named else [])
    assert len(found['limits']) == 4 and code == bool(named)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith('exceeded: ')]
    assert [line.partition(' is ')[0] for line in said] == ([f'exceeded: {named}'] if named else [])
    assert (f'Exceeded: {named}' if named else 'Every limit holds') in html


def test_a_library_serves_all_but_what_it_holds(recording, tiny_checkpoint, capsys):
    library = recording.parent / 'library'
    assert main(['library', 'build', '--checkpoint', str(tiny_checkpoint), '--episodes', str(recording), '--out',
                 str(library)]) == 1  # the empty one was skipped
    other = recording.parent / 'other.h5'
    capsys.readouterr()
    assert main(['replay', str(recording), '--checkpoint', str(tiny_checkpoint), '--library', str(library), '--out',
                 str(other)]) == 3
    assert 'no episode is left' in capsys.readouterr().err


def test_too_few_episodes_are_refused(look, tmp_path, tiny_checkpoint, capsys):
    write_recording(tmp_path / 'one.h5', [RecordedEpisode('run', True, [look()])])
    assert main(['replay', str(tmp_path / 'one.h5'), '--checkpoint', str(tiny_checkpoint), '--references', '1', '--out',
                 str(tmp_path / 'out')]) == 3
    assert '1 episodes cannot be split into 1 references' in capsys.readouterr().err


def test_the_predicted_chunks_become_a_bag(recording, tiny_checkpoint):
    from rosbags.highlevel import AnyReader

    bag = recording.parent / 'chunks'
    _, found, _ = replay(recording, tiny_checkpoint, '--out-bag', str(bag))
    with AnyReader([bag]) as reader:
        messages = [(c.topic, reader.deserialize(raw, c.msgtype)) for c, _, raw in reader.messages()]
    cached = [message for topic, message in messages if topic == '/rmuscle/cached']
    assert len(cached) == found['calls'] and cached[0].joint_names == NAMES and len(cached[0].points) == 8
    differences = [message.data for topic, message in messages if topic == '/rmuscle/action_difference']
    assert np.mean(differences) == pytest.approx(found['action_difference']['mean'])


def chunk_of(value, number, episode='e', dense=None):
    cached = np.full((4, 2), value, np.float32)
    return ReplayedCall(episode, number, 0.0, {}, cached if dense is None else dense, cached, 2.0,
                        CallReport(milliseconds={'total': 1.0}), {})


def test_measures_by_hand():
    zero = np.zeros((4, 2), np.float32)
    calls = [chunk_of(0.1, 0, dense=zero), chunk_of(0.3, 1, dense=zero), chunk_of(0.9, 0, 'f', zero)]
    scale = np.array([1.0, 2.0])
    found = measures.summarise(calls, ['x', 'y'], 2, scale, measures.Limits(boundary_ratio=1.0))
    assert found['joints']['x']['mean'] == pytest.approx((0.1 + 0.3 + 0.9) / 3)
    assert found['action_difference']['max'] == pytest.approx(0.9 * 0.75)  # half ranges of 1 and 2
    assert found['boundary_jump']['cached']['p95'] == pytest.approx(0.2)  # between the two calls of one episode only
    assert found['speedup'] == 2 and not found['limits'][0]['holds']


def test_pictures_are_kept_for_the_worst_calls_only(recording, tiny_checkpoint, monkeypatch):
    monkeypatch.setattr(measures, 'WORST', 2)
    kept = []
    monkeypatch.setattr('rmuscle_core.replay.report.write', lambda out, found, calls, *rest: kept.extend(calls))
    main(['replay', str(recording), '--checkpoint', str(tiny_checkpoint), '--out', str(recording.parent / 'o')])
    assert sum(bool(call.images) for call in kept) == 2 and len(kept) == 6


def test_an_image_is_shaded_where_it_was_reused():
    from rmuscle_core.replay.figures import shaded

    image = np.full((10, 6, 3), 200, np.uint8)
    share = np.array([[1.0, 0.0], [0.0, 0.0]])
    shade = shaded(image, share)
    assert shade[0, 0, 0] == 200 and shade[9, 5, 0] == 70 and shade.shape == (10, 6, 3)


@pytest.mark.parametrize('command', ['replay', 'serve'])
def test_a_mistyped_library_is_not_made(recording, tiny_checkpoint, tmp_path, command, capsys):
    wrong = tmp_path / 'nowhere'
    episodes = [str(recording)] if command == 'replay' else []
    assert main([command, *episodes, '--checkpoint', str(tiny_checkpoint), '--library', str(wrong)]) == 3
    assert f'there is no library at {wrong}' in capsys.readouterr().err and not wrong.exists()


def test_joints_that_stood_still_in_training_give_numbers(recording, tiny_checkpoint, tmp_path):
    checkpoint = shutil.copytree(tiny_checkpoint, tmp_path / 'still')
    write_statistics(checkpoint, unit=0.0, centre=0.5)
    _, found, _ = replay(recording, checkpoint, '--token-ratio', '0.3')
    values = [*found['action_difference'].values(), *(row['half_range'] for row in found['joints'].values())]
    values += [value for jumps in found['boundary_jump'].values() for value in jumps.values()]
    assert np.isfinite(values).all() and found['joints']['a']['half_range'] > 0
