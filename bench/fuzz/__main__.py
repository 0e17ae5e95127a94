# SPDX-License-Identifier: Apache-2.0
"""Hostile input for everything that reads: messages, files, parameters, requests.

    python bench/fuzz --inputs 20000 --seed 1

Every module beside this one has ``targets()``: name -> callable(rng) or callable(rng, empty folder), which makes one
input, tries it, and raises when it was neither used rightly nor refused. Independently of what a target checks, every
RMuscleError made meanwhile must be one sentence. Exit code 1 if anything failed; an input is repeated by
``--target NAME --first NUMBER --inputs 1`` and the same seed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import inspect
import json
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from rmuscle_core.errors import RMuscleError

LONGEST = 2000  # characters of a refusal; longer ones quote the input instead of describing it
SHOWN = 3  # failures of a target that are printed in full


@dataclasses.dataclass
class Outcome:
    """Counts of one target; failures: what to repeat it by, and the end of the traceback."""

    inputs: int = 0
    refused: int = 0
    unhandled: int = 0
    not_one_sentence: int = 0
    seconds: float = 0.0
    failures: list[str] = dataclasses.field(default_factory=list)

    @property
    def good(self) -> bool:
        return not self.unhandled and not self.not_one_sentence


def find_targets(folder: Path) -> dict[str, Callable]:
    """The targets of every module in the folder."""
    sys.path.insert(0, str(folder))
    found: dict[str, Callable] = {}
    for path in sorted(folder.glob('[a-z]*.py')):
        found.update(importlib.import_module(path.stem).targets())
    return found


@contextlib.contextmanager
def refusals() -> Iterator[list[RMuscleError]]:
    """Every RMuscleError that is made meanwhile, whoever catches it."""
    made: list[RMuscleError] = []
    begin = RMuscleError.__init__

    def note(error: RMuscleError, *arguments: object) -> None:
        begin(error, *arguments)
        made.append(error)

    RMuscleError.__init__ = note
    try:
        yield made
    finally:
        RMuscleError.__init__ = begin


def one_sentence(error: RMuscleError) -> bool:
    text = str(error)
    return bool(text.strip()) and '\n' not in text and len(text) < LONGEST


def attempt(name: str, target: Callable, seed: int, number: int, outcome: Outcome) -> None:
    """One input of a target."""
    rng = random.Random(f'{seed} {name} {number}')
    outcome.inputs += 1
    with refusals() as made, tempfile.TemporaryDirectory() as folder:
        try:
            target(*([rng, Path(folder)] if len(inspect.signature(target).parameters) > 1 else [rng]))
        except Exception:  # noqa: BLE001 - whatever escapes is the finding
            outcome.unhandled += 1
            outcome.failures.append(f'{name}, --first {number}: {traceback.format_exc(limit=-4)}')
    outcome.refused += bool(made)
    for error in made:
        if not one_sentence(error):
            outcome.not_one_sentence += 1
            outcome.failures.append(f'{name}, --first {number}: not one sentence: {str(error)[:LONGEST]!r}')


def run(targets: dict[str, Callable], inputs: int, seed: int, first: int = 0) -> dict[str, Outcome]:
    """Share the inputs out evenly over the targets."""
    outcomes = {}
    for place, (name, target) in enumerate(targets.items()):
        outcomes[name], since = Outcome(), time.monotonic()
        share = inputs // len(targets) + (place < inputs % len(targets))
        for number in range(first, first + share):
            attempt(name, target, seed, number, outcomes[name])
        outcomes[name].seconds = round(time.monotonic() - since, 1)
    return outcomes


def show(outcomes: dict[str, Outcome]) -> None:
    print('target | inputs | with a refusal | unhandled | not one sentence | s')
    for name, o in outcomes.items():
        print(f'{name} | {o.inputs} | {o.refused} | {o.unhandled} | {o.not_one_sentence} | {o.seconds}')
        print(*o.failures[:SHOWN], sep='\n', end='\n' if o.failures else '')
    total = [sum(getattr(o, field) for o in outcomes.values())
             for field in ('inputs', 'refused', 'unhandled', 'not_one_sentence')]
    print('all |', ' | '.join(map(str, total)))


def main() -> int:
    parser = argparse.ArgumentParser(prog='python bench/fuzz', description=__doc__.split('\n')[0])
    parser.add_argument('--inputs', type=int, default=20000, help='over all targets (default 20000)')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--target', action='append', help='only this one; may be repeated')
    parser.add_argument('--first', type=int, default=0, help='number of the first input of each target')
    parser.add_argument('--json', action='store_true', help='print JSON')
    options = parser.parse_args()
    targets = find_targets(Path(__file__).parent)
    unknown = set(options.target or ()) - set(targets)
    if unknown:
        parser.error(f'no target {", ".join(unknown)}; there are {", ".join(targets)}')
    chosen = {name: target for name, target in targets.items() if not options.target or name in options.target}
    outcomes = run(chosen, options.inputs, options.seed, options.first)
    if options.json:
        print(json.dumps({name: dataclasses.asdict(o) for name, o in outcomes.items()}, indent=2))
    else:
        show(outcomes)
    return 0 if all(o.good for o in outcomes.values()) else 1


if __name__ == '__main__':
    sys.exit(main())
