# SPDX-License-Identifier: Apache-2.0
"""``rmuscle library build | info | verify``."""

from __future__ import annotations

import argparse
import json
from datetime import datetime, timezone
from pathlib import Path

from rmuscle_core.bench.memory import memory_table, print_memory
from rmuscle_core.bench.report import progress_bar
from rmuscle_core.errors import LibraryError
from rmuscle_core.importing.commands import add_build
from rmuscle_core.library.episode import verify_episode
from rmuscle_core.library.folder import BROKEN, EPISODE
from rmuscle_core.library.index import StoredEpisode
from rmuscle_core.library.library import EpisodeLibrary
from rmuscle_core.library.repair import repair
from rmuscle_core.library.usage import eviction_order, last_used_ns

REPAIRED, LEFT = 1, 3  # exit codes

def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add ``library`` and its commands to the command line."""
    library = subparsers.add_parser('library', help='make, show and check an episode library')
    commands = library.add_subparsers(required=True, metavar='command')
    add_build(commands)
    info = commands.add_parser('info', help='what a library holds and what it was made with')
    info.add_argument('library', type=Path, help='folder of the library')
    info.add_argument('--memory', action='store_true', help='also what libraries of pi0.5 at full size take, on disk '
                      'and on the device')
    info.add_argument('--json', action='store_true', help='print one JSON object')
    info.set_defaults(run=run_info)
    verify = commands.add_parser(
        'verify', help='read every byte and compare it with its checksum; changes nothing',
        description='Exit code 0: nothing is wrong; 1: something was (with --repair: and is put right); 3: the library '
                    'cannot be used (with --repair: something is left that needs a person).')
    verify.add_argument('library', type=Path, help='folder of the library')
    verify.add_argument('--repair', action='store_true',
                        help='move broken files aside, bring back whole ones, remove what killed writers left, make a '
                             'lost library.json and the index again; deletes no recorded data')
    verify.set_defaults(run=run_verify)


def run_info(args: argparse.Namespace) -> int:
    """Print the counts, the size and the fingerprint."""
    library = EpisodeLibrary.open(args.library, set_aside=False)
    episodes = library.episodes
    calls = sum(len(episode.keys) for episode in episodes)
    found = {
        'tasks': {task: sum(e.task == task for e in episodes) for task in library.tasks()},
        'episodes': len(episodes), 'successful': sum(e.success for e in episodes), 'references': calls,
        'bytes': library.nbytes, 'bytes_per_reference': library.nbytes // max(calls, 1),
        'set_aside': len(list(args.library.glob(f'*/*{EPISODE}{BROKEN}*'))),
        'evicted_first': [_evictable(episode) for episode in eviction_order(episodes)[:5]],
        'fingerprint': library.fingerprint, 'problems': library.problems,
    }
    table = memory_table() if args.memory else {}
    if args.json:
        print(json.dumps({**found, **({'memory': table} if table else {})}, indent=2))
        return 0
    print(f'{args.library}: {calls} references in {found["episodes"]} episodes ({found["successful"]} successful), '
          f'{library.nbytes / 1e6:.1f} MB, {found["bytes_per_reference"]} bytes per reference')
    for heading in ('tasks', 'fingerprint'):
        print(heading, *(f'  {name}: {value}' for name, value in found[heading].items()), sep='\n')
    print('first to be deleted when library_capacity is exceeded', *(
        f'  {e["episode"]}: {"success" if e["success"] else "failure"}, last used {e["last_used"]}, '
        f'{e["bytes"] / 1e6:.1f} MB' for e in found['evicted_first']), sep='\n')
    if found['set_aside']:
        print(f'{found["set_aside"]} files are set aside as {BROKEN}; rmuscle library verify --repair tries them again')
    print(*library.problems, sep='\n', end='\n' if library.problems else '')
    if table:
        print('\nfor comparison, libraries of pi0.5 at full size:')
        print_memory(table)
    return 0


def _evictable(episode: StoredEpisode) -> dict[str, object]:
    used = datetime.fromtimestamp(last_used_ns(episode) / 1e9, timezone.utc)
    return {'episode': f'{episode.task}/{episode.episode}', 'success': episode.success, 'bytes': episode.nbytes,
            'last_used': used.strftime('%Y-%m-%d %H:%M UTC')}


def run_verify(args: argparse.Namespace) -> int:
    """Exit code 1 when any episode is damaged or does not belong to the library."""
    if args.repair:
        return _repair(args.library)
    library = EpisodeLibrary.open(args.library, set_aside=False)
    problems = list(library.problems)
    with progress_bar() as bar:
        task = bar.add_task('episodes', total=len(library.episodes))
        for episode in library.episodes:
            try:
                verify_episode(episode.path)
            except LibraryError as error:
                problems.append(str(error))
            bar.advance(task)
    print(*problems, sep='\n', end='\n' if problems else '')
    print(f'{len(library.episodes)} episodes checked, {len(problems)} problems')
    return 1 if problems else 0


def _repair(library: Path) -> int:
    with progress_bar() as bar:
        task = bar.add_task('episodes', total=None)
        done = repair(library, lambda path: bar.advance(task))
    for sentence in (*done.tidied, *done.repaired, *done.left):
        print(sentence)
    print(f'{len(EpisodeLibrary.open(library).episodes)} episodes can be used; {len(done.repaired)} problems repaired, '
          f'{len(done.left)} left')
    return LEFT if done.left else REPAIRED if done.repaired else 0
