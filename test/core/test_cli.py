# SPDX-License-Identifier: Apache-2.0
"""The command line: exit codes, one-sentence refusals, and that a command costs only its own imports."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rmuscle_core import cli
from rmuscle_core.errors import EpisodeError

MODULE = """
from rmuscle_core.errors import EpisodeError

def add_parser(subparsers):
    parser = subparsers.add_parser('count')
    parser.add_argument('--to', type=int, default=1)
    parser.set_defaults(run=run)

def run(options):
    if options.to < 0:
        raise EpisodeError('count.h5 ends at 3; expected 4; record it again')
    if options.to == 0:
        import {missing}
    return options.to
"""


@pytest.fixture
def count(tmp_path, monkeypatch):
    """A command of its own module; `import` of the given package fails in it."""
    def install(missing='rosbags_of_nobody'):
        (tmp_path / 'count_command.py').write_text(MODULE.format(missing=missing))
        monkeypatch.syspath_prepend(tmp_path)
        sys.modules.pop('count_command', None)
        monkeypatch.setitem(cli.COMMANDS, 'count', ('count_command', 'counts'))
    yield install
    sys.modules.pop('count_command', None)


def test_the_commands_result_is_the_exit_code(count):
    count()
    assert cli.main(['count']) == 1
    assert cli.main(['count', '--to', '5']) == 5


def test_unusable_data_is_one_sentence_and_code_3(count, capsys):
    count()
    assert cli.main(['count', '--to', '-1']) == cli.DATA == 3
    assert capsys.readouterr().err == f'rmuscle: {EpisodeError("count.h5 ends at 3; expected 4; record it again")}\n'


@pytest.mark.parametrize(('package', 'advice'), [
    ('rosbags_of_nobody', "pip install 'rosbags_of_nobody'"), ('rosbags', "pip install 'rmuscle[bags]'")])
def test_a_missing_package_is_named_with_the_command_that_installs_it(count, capsys, monkeypatch, package, advice):
    count(package)

    class Missing:
        def find_spec(self, name, path=None, target=None):
            if name == package:
                raise ModuleNotFoundError(f'No module named {name!r}', name=name)

    monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.setattr(sys, 'meta_path', [Missing(), *sys.meta_path])
    assert cli.main(['count', '--to', '0']) == cli.USAGE == 2
    message = capsys.readouterr().err
    assert package in message and advice in message and message.count('\n') == 1


def test_a_fault_of_our_own_is_not_blamed_on_the_installation(count):
    count('rmuscle_core.nothing_here')
    with pytest.raises(ModuleNotFoundError):
        cli.main(['count', '--to', '0'])


@pytest.mark.parametrize('arguments', [[], ['dance'], ['count', '--to', 'many']])
def test_wrong_usage_is_one_sentence_and_code_2(count, arguments, capsys):
    count()
    assert cli.main(arguments) == cli.USAGE
    assert capsys.readouterr().err.count('\n') == 1


def test_a_file_that_cannot_be_used_is_named(count, capsys, monkeypatch):
    count()
    import count_command

    monkeypatch.setattr(count_command, 'run', lambda options: Path('/nowhere/at/all').read_text())
    assert cli.main(['count']) == cli.DATA
    assert capsys.readouterr().err.startswith('rmuscle: /nowhere/at/all cannot be used (No such file or directory); ')


@pytest.fixture
def talk(tmp_path):
    """A process of a command that prints a megabyte."""
    (tmp_path / 'talk_command.py').write_text(
        "def add_parser(subparsers):\n    subparsers.add_parser('talk').set_defaults(run=lambda _: print('x' * "
                        "10**6))\n")
    code = ('import sys; from rmuscle_core import cli; cli.COMMANDS["talk"] = ("talk_command", "");'
            'sys.exit(cli.main(["talk"]))')
    environment = {**os.environ, 'PYTHONPATH': os.pathsep.join([str(tmp_path), *sys.path])}
    return lambda output: subprocess.Popen([sys.executable, '-c', code], stdout=output, stderr=subprocess.PIPE,
                                           text=True, env=environment)


def test_a_reader_that_ends_early_ends_the_command_quietly(talk):
    with talk(subprocess.PIPE) as process:
        process.stdout.close()
        assert process.wait(60) == cli.CLOSED and process.stderr.read() == ''


def test_output_that_finds_no_room_is_one_sentence(talk):
    with Path('/dev/full').open('w') as full, talk(full) as process:
        assert process.wait(60) == cli.DATA
        assert process.stderr.read().startswith('rmuscle: a file or the output cannot be used (No space left on '
                                   'device)')


def test_the_exit_codes_are_told_in_one_place(capsys):
    with pytest.raises(SystemExit):
        cli.main(['--help'])
    listed = capsys.readouterr().out.partition('exit codes:')[2]
    assert all(f' {code}  ' in listed for code in (0, 1, cli.USAGE, cli.DATA, cli.INTERRUPTED, cli.CLOSED))


@pytest.mark.parametrize('name', sorted(cli.COMMANDS))
def test_every_command_has_help(name, capsys):
    module = importlib.import_module(cli.COMMANDS[name][0])
    assert callable(module.add_parser)
    with pytest.raises(SystemExit) as exit_:
        cli.main([name, '--help'])
    assert exit_.value.code == 0
    assert f'rmuscle {name}' in capsys.readouterr().out


def test_help_lists_all_commands_and_imports_none():
    code = ('import sys; from rmuscle_core import cli\n'
            'try: cli.main(["--help"])\n'
            'finally: assert "torch" not in sys.modules and "mujoco" not in sys.modules')
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in cli.COMMANDS)
