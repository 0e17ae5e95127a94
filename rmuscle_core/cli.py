# SPDX-License-Identifier: Apache-2.0
"""``rmuscle verify | library | bench | workcell ...``

Exit codes: 0 fine, 1 a threshold is exceeded, 2 wrong usage or a missing package, 3 unusable data, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from rmuscle_core import __version__
from rmuscle_core.errors import RMuscleError

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
USAGE, DATA, INTERRUPTED = 2, 3, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; refusals are one sentence on stderr."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        options = build_parser(next((a for a in arguments if not a.startswith('-')), None)).parse_args(arguments)
        return options.run(options)
    except RMuscleError as error:
        print(f'rmuscle: {error}', file=sys.stderr)
        return DATA
    except KeyboardInterrupt:
        print('rmuscle: interrupted', file=sys.stderr)
        return INTERRUPTED
    except ModuleNotFoundError as error:
        package = (error.name or '').partition('.')[0]
        if not package or package.startswith('rmuscle'):
            raise  # a fault of ours, not of the installation
        wanted = f'rmuscle[{EXTRAS[package]}]' if package in EXTRAS else package
        print(f"rmuscle: this command needs the Python package {package}, which is not installed; "
              f"install it with: pip install '{wanted}'", file=sys.stderr)
        return USAGE


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """Return the parser; only the named command's module is imported, the others appear in the help."""
    parser = argparse.ArgumentParser(prog='rmuscle', description='Muscle memory for vision-language-action policies.')
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
