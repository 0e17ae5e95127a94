# SPDX-License-Identifier: Apache-2.0
"""Kill processes that record episodes, at random moments, and look at what they leave.

    python bench/kill_writers.py --kills 200

After each SIGKILL the library must open without a problem, hold every episode whose recording was reported done and at
most one more, and every byte of it must match its checksum. Exit code 1 if not. Uses little disk, in --folder.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

from rmuscle_core.library import EpisodeLibrary, Reference, ReferenceId
from rmuscle_core.library.episode import verify_episode

FINGERPRINT = {'weights': 'of no checkpoint'}
CALLS = 6
STAGES = ('begin', *(f'call {number}' for number in range(CALLS)), 'closed', 'verified', 'visible')
KILLS_PER_LIBRARY = 20


@dataclass(frozen=True)
class Outcome:
    """stage: the last that the killed process told. done, begun: episodes it told of. kept: those in the library."""

    stage: str
    done: int
    begun: int
    kept: int
    unfinished: int
    problems: list[str]

    @property
    def good(self) -> bool:
        return not self.problems and self.done <= self.kept <= self.begun


def recording(seed: int, tokens: int = 32) -> list[Reference]:
    """An episode of small references with seeded content."""
    values = np.random.default_rng(seed)
    return [Reference(
        id=ReferenceId('stack', 'one', call), views=('top', 'wrist'),
        prefix=torch.from_numpy(values.normal(size=(tokens, 64)).astype(np.float32)).bfloat16(),
        token_ids=values.integers(0, 520, 11, dtype=np.int32), states=values.normal(size=(3, 5)).astype(np.float32),
        key=values.normal(size=(2, 24)).astype(np.float32), neurons=values.integers(0, 64, (2, 3, 40), dtype=np.uint16),
        chunk=values.normal(size=(6, 5)).astype(np.float32)) for call in range(CALLS)]


def record_for_ever(path: Path, name: str, tokens: int, told: Connection) -> None:
    """The process that is killed."""
    library = EpisodeLibrary.open(path, FINGERPRINT)
    for number in count():
        told.send('begin')
        library.add_episode('stack', recording(number, tokens), True, f'{name}-{number:03d}', on_stage=told.send)


def warm_server() -> multiprocessing.context.BaseContext:
    """Processes that have the slow imports behind them when they start: forks of one that never did anything else."""
    context = multiprocessing.get_context('forkserver')
    context.set_forkserver_preload(['rmuscle_core.library'])
    return context


def kill_once(context: multiprocessing.context.BaseContext, path: Path, name: str, stages: int, delay_s: float = 0.0,
              tokens: int = 32) -> Outcome:
    """Let a process record into the library until it has reported so many stages and a while longer; kill it, look."""
    before = len(EpisodeLibrary.open(path, FINGERPRINT).episodes)
    ours, theirs = context.Pipe(duplex=False)
    writer = context.Process(target=record_for_ever, args=(path, name, tokens, theirs))
    writer.start()
    theirs.close()
    told = [ours.recv() for _ in range(stages)]
    time.sleep(delay_s)
    writer.kill()
    told += _rest(ours)
    writer.join()
    unfinished = len(list(path.glob('*/.*.tmp')))
    library = EpisodeLibrary.open(path, FINGERPRINT)
    problems = list(library.problems) + _damage(library)
    problems += [f'{stale} was not removed' for stale in path.glob('*/.*.tmp')]
    return Outcome(told[-1], told.count('visible'), told.count('begin'), len(library.episodes) - before, unfinished,
                   problems)


def _rest(connection: Connection) -> list[str]:
    told = []
    try:
        while True:
            told.append(connection.recv())
    except EOFError:
        return told


def _damage(library: EpisodeLibrary) -> list[str]:
    found = []
    for episode in library.episodes:
        try:
            verify_episode(episode.path)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
            found.append(f'{type(error).__name__}: {error}')
    return found


def run(kills: int, seed: int, folder: Path, tokens: int, on_kill: Callable[[Outcome], None]) -> list[Outcome]:
    """Kill so many writers, a fresh library for every 20 of them."""
    moments, context, outcomes = random.Random(seed), warm_server(), []
    for number in range(kills):
        path = folder / f'library-{number // KILLS_PER_LIBRARY}'
        EpisodeLibrary.open_or_create(path, FINGERPRINT)
        stages = moments.randrange(1, 4 * len(STAGES))
        outcomes.append(kill_once(context, path, f'k{number:03d}', stages, moments.uniform(0, 0.01), tokens))
        on_kill(outcomes[-1])
    return outcomes


def summary(outcomes: list[Outcome]) -> dict[str, object]:
    """Figures of a run; what was lost are episodes begun and not in the library."""
    return {'kills': len(outcomes), 'failures': sum(not o.good for o in outcomes),
            'episodes_recorded': sum(o.kept for o in outcomes), 'most_lost': max(o.begun - o.kept for o in outcomes),
            'unfinished_files': sum(o.unfinished for o in outcomes),
            'killed_after': dict(Counter(o.stage for o in outcomes).most_common())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--kills', type=int, default=200)
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--tokens', type=int, default=1024, help='per reference; more make larger files (default 1024)')
    parser.add_argument('--folder', type=Path, help='where the libraries are written; default: a temporary one')
    options = parser.parse_args()

    def show(outcome: Outcome) -> None:
        if not outcome.good:
            print(outcome, file=sys.stderr)

    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        outcomes = run(options.kills, options.seed, Path(folder), options.tokens, show)
    print(json.dumps(summary(outcomes), indent=2))
    return 0 if all(outcome.good for outcome in outcomes) else 1


if __name__ == '__main__':
    sys.exit(main())
