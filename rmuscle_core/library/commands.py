# SPDX-License-Identifier: Apache-2.0
"""``rmuscle library build | info | verify``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.progress import Progress

from rmuscle_core.errors import EpisodeError, LibraryError
from rmuscle_core.library.episode import verify_episode
from rmuscle_core.library.library import EpisodeLibrary
from rmuscle_core.library.recording import open_recording
from rmuscle_core.settings import WEIGHT_DTYPES, Settings


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add ``library`` and its commands to the command line."""
    library = subparsers.add_parser('library', help='make, show and check an episode library')
    commands = library.add_subparsers(required=True, metavar='command')
    build = commands.add_parser('build', help='turn recorded episodes into a library, or add them to one')
    build.add_argument('--checkpoint', type=Path, required=True, help='LeRobot checkpoint directory')
    build.add_argument('--episodes', type=Path, required=True, help='recording of raw observations (HDF5)')
    build.add_argument('--out', type=Path, required=True, help='library directory')
    build.add_argument('--device', default='cpu', help='where the policy runs (default: cpu)')
    build.add_argument('--weight-dtype', choices=WEIGHT_DTYPES, default='checkpoint',
                       help='as the policies that will use the library have it (default: checkpoint)')
    build.set_defaults(run=run_build)
    info = commands.add_parser('info', help='what a library holds and what it was made with')
    info.add_argument('library', type=Path)
    info.add_argument('--json', action='store_true', help='print JSON')
    info.set_defaults(run=run_info)
    verify = commands.add_parser('verify', help='read every byte and compare it with its checksum; changes nothing')
    verify.add_argument('library', type=Path)
    verify.set_defaults(run=run_verify)


def run_build(args: argparse.Namespace) -> int:
    """Record every episode of the file that the library does not have yet; an interrupted build can be repeated."""
    from rmuscle_core.policy import MusclePolicy, task_of

    settings = Settings(weight_dtype=args.weight_dtype)
    with open_recording(args.episodes) as recording:
        first = next((episode.observations[0] for episode in recording if episode.observations), None)
    policy = MusclePolicy.load(args.checkpoint, settings, args.out, args.device, need_library=True,
                               cameras=first and first.images)
    added = 0
    try:
        with open_recording(args.episodes) as recording, _progress() as progress:
            bar = progress.add_task('episodes', total=len(recording))
            known = {(e.task, e.episode) for e in policy.library.episodes}
            for episode in recording:
                progress.advance(bar)
                if not episode.observations:
                    raise EpisodeError(f'episode {episode.name} of {args.episodes} has no observations; '
                                       'remove it from the recording')
                task = task_of(episode.observations[0].prompt)
                if (task, episode.name) not in known:
                    references = policy.record_references(episode.observations, task, episode.name)
                    policy.library.add_episode(task, references, episode.success, episode.name)
                    added += 1
    finally:
        policy.close()
    print(f'{added} episodes added to {args.out}')
    return 0


def run_info(args: argparse.Namespace) -> int:
    """Print the counts, the size and the fingerprint; as text also what a full-size library would need."""
    from rmuscle_core.bench.memory import memory_table, print_memory  # needs the model, which --json does not

    library = EpisodeLibrary.open(args.library, set_aside=False)
    episodes = library.episodes
    calls = sum(len(episode.keys) for episode in episodes)
    found = {
        'tasks': {task: sum(e.task == task for e in episodes) for task in library.tasks()},
        'episodes': len(episodes), 'successful': sum(e.success for e in episodes), 'references': calls,
        'bytes': library.nbytes, 'bytes_per_reference': library.nbytes // max(calls, 1),
        'fingerprint': library.fingerprint, 'problems': library.problems,
    }
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    print(f'{args.library}: {calls} references in {found["episodes"]} episodes ({found["successful"]} successful), '
          f'{library.nbytes / 1e6:.1f} MB, {found["bytes_per_reference"]} bytes per reference')
    for heading in ('tasks', 'fingerprint'):
        print(heading, *(f'  {name}: {value}' for name, value in found[heading].items()), sep='\n')
    print(*library.problems, sep='\n', end='\n' if library.problems else '')
    print('\nfor comparison, a library of pi0.5 at full size:')
    print_memory(memory_table())
    return 0


def run_verify(args: argparse.Namespace) -> int:
    """Exit code 1 when any episode is damaged or does not belong to the library."""
    library = EpisodeLibrary.open(args.library, set_aside=False)
    problems = list(library.problems)
    with _progress() as progress:
        for episode in progress.track(library.episodes, description='episodes'):
            try:
                verify_episode(episode.path)
            except LibraryError as error:
                problems.append(str(error))
    print(*problems, sep='\n', end='\n' if problems else '')
    print(f'{len(library.episodes)} episodes checked, {len(problems)} problems')
    return 1 if problems else 0


def _progress() -> Progress:
    return Progress(disable=not sys.stdout.isatty())
