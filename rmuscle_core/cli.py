# SPDX-License-Identifier: Apache-2.0
"""``rmuscle verify | library | bench | workcell ...``"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from rmuscle_core import __version__
from rmuscle_core.errors import RMuscleError, SettingsError, reason

# command -> (module with add_parser(subparsers), what it does)
COMMANDS = {
    'verify': ('rmuscle_core.verify', 'compare this implementation with recorded outputs of another'),
    'library': ('rmuscle_core.library.commands', 'look into, check and build episode libraries'),
    'bench': ('rmuscle_core.bench.commands', 'measure policy calls, dense and cached'),
    'doctor': ('rmuscle_core.doctor.commands', 'what keeps a policy from running here, and how to put it right'),
    'serve': ('rmuscle_core.serve.commands', 'answer openpi clients over a websocket'),
    'eval': ('rmuscle_core.evaluation.commands', 'closed-loop success of settings, other methods and controls'),
    'characterize': ('rmuscle_core.evaluation.characterize_commands',
                     'what repeated executions have in common inside the model'),
    'replay': ('rmuscle_core.replay.commands', 'recorded executions dense and cached side by side, as one report'),
    'tune': ('rmuscle_core.tuning.commands', 'choose ratios and window on recorded executions'),
    'workcell': ('rmuscle_core.workcell.commands', 'simulated two-arm work cell: demonstrations, training, evaluation'),
}
EXTRAS = {'triton': 'gpu', 'rosbags': 'bags', 'pyarrow': 'lerobot', 'av': 'lerobot', 'websockets': 'serve',
          'msgpack': 'serve', 'gym_aloha': 'workcell', 'dm_control': 'workcell', 'mujoco': 'workcell'}
USAGE, DATA, INTERRUPTED, CLOSED = 2, 3, 130, 141
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
EXIT_CODES = """exit codes:
    0  done, and nothing found wrong
    1  done; the answer is no: a limit is exceeded, outputs differ, episodes were skipped, something must be put right
    2  refused: the command line or a parameter file is wrong or asks too much of this machine, or a package is missing
    3  refused: a checkpoint, recording, library or place to write cannot be used
  130  interrupted;  141  the program that read the output ended"""


class Parser(argparse.ArgumentParser):
    """Refuses with one sentence instead of the usage and a sentence."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(f'{message}; see {self.prog} --help')


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code, one of EXIT_CODES; refusals are one sentence on stderr."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        options = build_parser(next((a for a in arguments if not a.startswith('-')), None)).parse_args(arguments)
        code = options.run(options)
        sys.stdout.flush()
        return code
    except SettingsError as error:
        return _refused(USAGE, str(error))
    except RMuscleError as error:
        return _refused(DATA, str(error))
    except KeyboardInterrupt:
        return _refused(INTERRUPTED, 'interrupted')
    except BrokenPipeError:  # as in "rmuscle ... | head"
        _drop_output()
        return CLOSED
    except ModuleNotFoundError as error:
        package = (error.name or '').partition('.')[0]
        if not package or package.startswith('rmuscle'):
            raise  # a fault of ours, not of the installation
        wanted = f'rmuscle[{EXTRAS[package]}]' if package in EXTRAS else package
        return _refused(USAGE, f'this command needs the Python package {package}, which is not installed; install it '
                               f"with: pip install '{wanted}'")
    except OSError as error:
        if error.filename is None and error.errno not in FULL:
            raise  # no file's fault
        if error.filename is None:  # of an open file, so perhaps of standard output
            _drop_output()
        return _refused(DATA, f'{error.filename or "a file or the output"} cannot be used ({reason(error)}); check '
                              'the path, its permissions and the disk')


def _drop_output() -> None:
    """What is still to be written is of no use; Python would try again when it ends, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refused(code: int, sentence: str) -> int:
    print(f'rmuscle: {sentence}', file=sys.stderr)
    return code


def build_parser(command: str | None = None) -> Parser:
    """Return the parser; only the named command's module is imported, the others appear in the help.

    Its ``parse_args`` raises SettingsError for a wrong command line.
    """
    parser = Parser(prog='rmuscle', description='Muscle memory for vision-language-action policies. '
                    '"rmuscle COMMAND --help" tells more.', epilog=EXIT_CODES,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--version', action='version', version=f'rmuscle {__version__}')
    subparsers = parser.add_subparsers(required=True, metavar='command')
    for name, (module, description) in COMMANDS.items():
        if name == command:
            importlib.import_module(module).add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=description)
    return parser


if __name__ == '__main__':
    sys.exit(main())
