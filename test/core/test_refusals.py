# SPDX-License-Identifier: Apache-2.0
"""What a user may mistype, over every option of every command: one sentence, an exit code, nothing written."""

from __future__ import annotations

import argparse
import re
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
from parsers import commands, needed, options
from tiny_policy import CAMERAS

from rmuscle_core import cli
from rmuscle_core.library.recording import RecordedEpisode, write_recording
from rmuscle_core.options import new_folder, output_file, output_folder

ALL = commands()
OPTIONS = [(words, parser, action) for words, parser in ALL for action in options(parser)]
OUTPUTS = (output_file, output_folder, new_folder)
REFERENCE = next((Path(__file__).parents[1] / 'data/parity/tiny_pi05_float32').glob('*.npz'))
PYTHON = re.compile(r'Traceback|Errno|\b\w+(Error|Exception)\b|NoneType|<class|object at 0x|pickle|\(\)')


def name_of(value):
    return '-'.join(value) if isinstance(value, tuple) else value.dest if isinstance(value, argparse.Action) else ''


def value_options(*types):
    return [pytest.param(words, action, id=f'{"-".join(words)}-{action.dest}') for words, _, action in OPTIONS
            if action.type in types]


def command(words, parser, action, given):
    """The beginning of a command line that lacks nothing but the option."""
    line = [*words]
    for other in needed(parser, action):
        line += [*other.option_strings[:1], given[other.dest]]
    return line


def refused(capsys, arguments, expected=cli.USAGE):
    """The one sentence on stderr."""
    code = cli.main([*map(str, arguments)])
    out, err = capsys.readouterr()
    assert code == expected and not out and err.count('\n') == 1 and err.startswith('rmuscle: '), (code, out, err)
    assert not PYTHON.search(err) and (';' in err or ': give' in err), err
    return err


@pytest.mark.parametrize(('words', 'parser'), ALL, ids=name_of)
def test_every_option_says_what_it_is_and_what_holds_without_it(words, parser):
    for action in options(parser):
        assert action.help and action.help != argparse.SUPPRESS, action.dest
        takes_value = action.nargs != 0 and action.option_strings
        if takes_value and action.default not in (None, '', []):
            assert 'default' in action.help, f'{action.dest} has the default {action.default}, its help does not say so'
        assert action.type not in (int, float), f'{action.dest}: give its range with whole(), number() or positive'
    assert '%' not in parser.format_help()


@pytest.mark.parametrize(('words', 'action'), [
    pytest.param(words, action, id=f'{"-".join(words)}-{action.dest}') for words, _, action in OPTIONS
    if action.type not in (None, Path, *OUTPUTS)])
def test_a_value_outside_its_range_is_refused_before_anything_is_read(words, action, capsys):
    for value in ('', '-1', 'nan', '-inf', '1e400', '9' * 30, 'nowhere', '1,5'):
        with pytest.raises(argparse.ArgumentTypeError) as refusal:
            action.type(value)
        assert not PYTHON.search(str(refusal.value))
    err = refused(capsys, [*words, action.option_strings[0], 'nowhere'])
    assert action.option_strings[0] in err and f'rmuscle {" ".join(words)} --help' in err


@pytest.mark.parametrize(('words', 'action'), value_options(*OUTPUTS))
def test_a_place_that_cannot_be_written_is_refused_before_the_work(words, action, tmp_path, capsys, monkeypatch):
    (tmp_path / 'folder').mkdir()
    (tmp_path / 'file').touch()
    wrong = {output_file: ['folder'], output_folder: ['file'], new_folder: ['folder', 'file']}[action.type]
    for place in (*wrong, 'file/below', 'file/further/below'):
        err = refused(capsys, [*words, action.option_strings[0], tmp_path / place])
        assert str(tmp_path / place) in err
    monkeypatch.setattr('os.access', lambda path, mode: Path(path) != tmp_path)
    err = refused(capsys, [*words, action.option_strings[0], tmp_path / 'new/below'])
    assert f'this user may not write to {tmp_path}' in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ['file', 'folder']


# what may stand where something of a kind belongs: name -> how to make it
def text(path):
    path.write_text('hello: [not closed\n')


def folder_with(name, content='hello'):
    def make(path):
        (path / name).parent.mkdir(parents=True)
        (path / name).write_text(content)
    return make


def other_hdf5(path):
    with h5py.File(path, 'w') as file:
        file['x'] = np.zeros(100)


def cut(write):
    def make(path):
        write(path)
        path.write_bytes(path.read_bytes()[:path.stat().st_size // 2])
    return make


def other_npz(path):
    with path.open('wb') as file:
        np.savez(file, a=np.zeros(1000))


def array(path):
    with path.open('wb') as file:
        np.save(file, np.zeros(3))


ANYTHING = {'absent': lambda path: None, 'absent/below': lambda path: None, 'folder': Path.mkdir, 'text.txt': text,
            'empty.txt': Path.touch}
CHECKPOINTS = {**ANYTHING, 'text': folder_with('config.json'), 'no weights': folder_with('config.json', '{}')}
LIBRARIES = {**ANYTHING, 'text': folder_with('library.json'), 'folder in its place': folder_with('library.json/x'),
             'another': folder_with('library.json', '{"format": "x"}')}
EPISODES = {**ANYTHING, 'text.h5': text, 'empty.h5': Path.touch, 'other.h5': other_hdf5, 'cut.h5': cut(other_hdf5),
            'text.mcap': text, 'empty.mcap': Path.touch, 'text.db3': text, 'bag': folder_with('metadata.yaml'),
            'dataset': folder_with('meta/info.json'), 'bad dataset': folder_with('meta/info.json', '{"fps": 3}')}
ARCHIVES = {**ANYTHING, 'text.npz': text, 'empty.npz': Path.touch, 'other.npz': other_npz, 'cut.npz': cut(other_npz),
            'array.npy': array}
PARAMETERS = {**ANYTHING, 'text.yaml': text, 'list.yaml': lambda path: path.write_text('- 1\n'),
              'number.yaml': lambda path: path.write_text('/**: {ros__parameters: 3}\n'),
              'other.yaml': lambda path: path.write_text('camera_node: {ros__parameters: {}}\n'),
              'bytes.yaml': lambda path: path.write_bytes(bytes(range(256)))}
INPUTS = {'checkpoint': CHECKPOINTS, 'against': CHECKPOINTS, 'vision_from': CHECKPOINTS, 'start': CHECKPOINTS,
          'library': LIBRARIES, 'episodes': EPISODES, 'reference': ARCHIVES, 'data': ARCHIVES,
          'parameters': PARAMETERS, 'root': {'absent': ANYTHING['absent'], 'text.txt': text}}


@pytest.fixture(scope='module')
def good(tiny_checkpoint, look, tmp_path_factory):
    """Values of required options that are as they should be, but for the simulator's demonstrations."""
    folder = tmp_path_factory.mktemp('good')
    write_recording(folder / 'episodes.h5', [RecordedEpisode(f'e{n}', True, [look(n)]) for n in range(4)])
    folder_with('metadata.yaml')(folder / 'bag')
    (folder / 'robot.yaml').write_text(f'/**: {{ros__parameters: {{cameras: [{", ".join(CAMERAS)}], '
                                       'joint_names: [a, b, c, d, e]}}')
    return {'checkpoint': tiny_checkpoint, 'episodes': folder / 'episodes.h5', 'bag': folder / 'bag',
            'parameters': folder / 'robot.yaml', 'reference': REFERENCE, 'data': folder / 'absent.npz'}


@pytest.mark.parametrize(('words', 'action'), [p for p in value_options(Path) if p.values[0] != ('doctor',) or
                                               p.values[1].dest == 'root'])  # doctor reports the others: below
def test_an_input_of_another_kind_is_refused_in_one_sentence(words, action, good, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr('rmuscle_core.model.checkpoint._read_weights', lambda *_: pytest.fail('weights were read'))
    parser = next(parser for others, parser in ALL if others == words)
    given = {**good, 'out': tmp_path / 'out'}
    if action.dest == 'parameters':
        given['episodes'] = good['bag']  # which needs them
    before = command(words, parser, action, given)
    if action.dest == 'episodes':
        before += ['--parameters', given['parameters']]
    for kind, make in INPUTS[action.dest].items():
        path = tmp_path / 'inputs' / kind
        path.parent.mkdir(exist_ok=True)
        make(path)
        arguments = [*before, *action.option_strings[:1], path]
        err = refused(capsys, arguments, cli.USAGE if action.dest in ('parameters', 'root') else cli.DATA)
        assert str(path) in err, kind
    assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize('option', ['checkpoint', 'library'])
def test_doctor_reports_what_others_refuse(option, tmp_path, capsys):
    for number, make in enumerate(INPUTS[option].values()):
        path = tmp_path / str(number)
        make(path)
        assert cli.main(['doctor', f'--{option}', str(path)]) == 1
        lines = capsys.readouterr().out.splitlines()
        at = next(n for n, line in enumerate(lines) if line.startswith(f'FAIL {option}'))
        assert lines[at + 1].startswith('     fix: ') and not PYTHON.search(lines[at]), lines[at]


def test_cut_weights_are_refused_by_every_command(tiny_checkpoint, good, tmp_path, capsys):
    checkpoint = Path(shutil.copytree(tiny_checkpoint, tmp_path / 'cut'))
    weights = checkpoint / 'model.safetensors'
    weights.write_bytes(weights.read_bytes()[:-100])
    for words, parser in ALL:
        action = next((action for action in options(parser) if action.dest == 'checkpoint'), None)
        if action and words != ('doctor',):
            before = command(words, parser, action, {**good, 'out': tmp_path / 'out'})
            assert str(weights) in refused(capsys, [*before, '--checkpoint', checkpoint], cli.DATA)
