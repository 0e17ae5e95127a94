# SPDX-License-Identifier: Apache-2.0
"""Run rows over seeds in parallel; every finished episode is a line of a file, so that a run can be resumed."""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from rmuscle_core.engine.eager import EagerEngine
from rmuscle_core.errors import RMuscleError
from rmuscle_core.evaluation import libraries
from rmuscle_core.evaluation.rows import BY_NAME, Row
from rmuscle_core.library import EpisodeLibrary, fingerprint
from rmuscle_core.model import load_model
from rmuscle_core.observation import Observation
from rmuscle_core.policy import MusclePolicy, mask_layout
from rmuscle_core.processing import Processor
from rmuscle_core.settings import PROFILES, Settings
from rmuscle_core.workcell.evaluate import check_fits, run_episode
from rmuscle_core.workcell.tasks import TASKS, Cell

BATCH = 10  # seeds a worker is given at a time


@dataclass(frozen=True)
class Plan:
    """What is run where. errors: of how many seeds every call is repeated densely, to tell how far actions move."""

    task: str
    checkpoint: Path
    out: Path
    errors: int = 20
    library_seed: int = 5000

    def begin(self) -> None:
        """Make the results file, or check that the one there is of the same policy and library, and cut off a line
        that a kill left unfinished. Raises RMuscleError when it is of others."""
        weights = hashlib.blake2b(digest_size=8)
        for file in sorted(self.checkpoint.glob('*.safetensors')):
            weights.update(file.read_bytes())
        mine = {'task': self.task, 'weights': weights.hexdigest(), 'library_seed': self.library_seed,
                'profiles': {name: list(ratios) for name, ratios in PROFILES.items()}, 'defaults': asdict(Settings())}
        if not self.results.exists():
            self.results.write_text(json.dumps(mine) + '\n')
            return
        text = self.results.read_text()
        self.results.write_text(text[:text.rfind('\n') + 1])
        theirs = next(iter(read(self.results, header=True)), None)
        other = [name for name, value in mine.items() if (theirs or {}).get(name) != value]
        if other:
            raise RMuscleError(f'{self.results} holds a run with other {", ".join(other)} than this one; choose '
                               'another --out, or delete that file')

    @property
    def recording(self) -> Path:
        return self.out / 'executions.h5'

    @property
    def results(self) -> Path:
        return self.out / 'episodes.jsonl'


def evaluate(plan: Plan, rows: Sequence[Row], seeds: Sequence[int], processes: int,
             progress: Callable[[int, int], None] = lambda done, total: None) -> list[dict]:
    """Run what is not in the results file yet, and return its lines for these rows and seeds."""
    plan.out.mkdir(parents=True, exist_ok=True)
    plan.begin()
    done = {(line['row'], line['seed']): line for line in read(plan.results)}
    jobs = [(row.name, batch) for row in rows
            for batch in _batches([seed for seed in seeds if (row.name, seed) not in done], BATCH)]
    total, missing = len(rows) * len(seeds), sum(len(batch) for _, batch in jobs)
    progress(total - missing, total)
    if jobs:
        _prepare(plan, [BY_NAME[name] for name in dict.fromkeys(name for name, _ in jobs)], seeds)
        with _workers(processes, (plan, tuple(seeds[:plan.errors]), seeds[0])) as run, plan.results.open('a') as file:
            for lines in run(jobs):
                for line in lines:
                    done[line['row'], line['seed']] = line
                    file.write(json.dumps(line) + '\n')
                file.flush()
                missing -= len(lines)
                progress(total - missing, total)
    return [done[row.name, seed] for row in rows for seed in seeds]


def read(path: Path, header: bool = False) -> list[dict]:
    """Episodes of a results file, or what stands before them; a last line cut off by a kill does not count."""
    if not path.exists():
        return []
    lines = []
    for number, text in enumerate(path.read_text().splitlines(keepends=True)):
        try:
            lines.append(json.loads(text))
        except ValueError:
            if text.endswith('\n'):
                raise RMuscleError(f'line {number + 1} of {path} is not JSON; remove the file to start again') from None
    return [line for line in lines if ('row' in line) != header]


def _batches(seeds: list[int], size: int) -> Iterable[list[int]]:
    return (seeds[start:start + size] for start in range(0, len(seeds), size))


def _prepare(plan: Plan, rows: Sequence[Row], seeds: Sequence[int]) -> None:
    count = max(row.episodes for row in rows)
    recorded = range(plan.library_seed, plan.library_seed + 10 * count)
    shared = set(seeds) & set(recorded)
    if shared:
        raise RMuscleError(f'seed {min(shared)} would be tested with a library that may hold it; choose seeds outside '
                           f'[{recorded[0]}, {recorded[-1]}], or another --library-seed')
    torch.set_num_threads(1)
    cell = _cell(plan)
    libraries.record(plan.checkpoint, cell, plan.recording, count, plan.library_seed)
    cell.close()
    for row in {libraries.library_name(row): row for row in rows}.values():
        libraries.build(row, plan.checkpoint, plan.recording, plan.out / 'libraries')


def _cell(plan: Plan) -> Cell:
    from rmuscle_core.model import load_config

    return TASKS[plan.task].make_cell(load_config(plan.checkpoint).vision.image_size)


@contextmanager
def _workers(processes: int, arguments: tuple) -> Iterator[Callable[[list], Iterable[list[dict]]]]:
    """What runs jobs, in any order: other processes, or this one where a single one is asked for."""
    if processes == 1:
        _start(*arguments)
        try:
            yield lambda jobs: map(_run, jobs)
        finally:
            _worker.close()
        return
    context = multiprocessing.get_context('spawn')  # torch's threads and GL contexts do not survive a fork
    with context.Pool(processes, _start, arguments) as pool:
        yield lambda jobs: pool.imap_unordered(_run, jobs)


_worker: _Worker


def _start(plan: Plan, error_seeds: tuple[int, ...], first_seed: int) -> None:
    global _worker
    torch.set_num_threads(1)
    _worker = _Worker(plan, error_seeds, first_seed)


def _run(job: tuple[str, list[int]]) -> list[dict]:
    name, seeds = job
    return [_worker.episode(BY_NAME[name], seed) for seed in seeds]


class _Worker:
    """One process: a cell, and the policy of the row it was last asked for."""

    def __init__(self, plan: Plan, error_seeds: tuple[int, ...], first_seed: int) -> None:
        self.plan, self.error_seeds = plan, error_seeds
        self.cell = _cell(plan)
        self.cell.reset(first_seed)
        self.frozen = self.cell.images()
        self.dense = MusclePolicy.load(plan.checkpoint, Settings(mode='dense'))
        half = self.dense.config.chunk_size, self.dense.config.padded_dim
        blank = Observation(self.frozen, self.cell.state(), self.cell.task, 0.0)
        self.scale = np.abs(self.dense.processor.decode(np.ones(half, np.float32), blank)
                            - self.dense.processor.decode(-np.ones(half, np.float32), blank)) / 2
        self.row, self.policy = None, None

    def episode(self, row: Row, seed: int) -> dict:
        policy = self._policy(row)
        timed = Timed(policy, self.dense if seed in self.error_seeds else None, self.scale)
        episode = run_episode(self.cell, timed, seed, policy.config.execute_steps,
                              self.frozen if row.frozen else None)
        similarities = [r.similarity for r in episode.reports if np.isfinite(r.similarity)]
        return {'row': row.name, 'seed': seed, 'success': bool(episode.success), 'steps': episode.steps,
                'calls': len(episode.reports), 'paths': dict(Counter(r.path for r in episode.reports)),
                'similarity': float(np.mean(similarities)) if similarities else None,
                'cpu_ms': float(np.mean(timed.cpu_ms)), 'error': float(np.mean(timed.errors)) if timed.errors else None,
                'states': [[round(float(v), 4) for v in o.state] for o in episode.observations]}

    def close(self) -> None:
        """Stop the policies' threads, and the simulator."""
        self.dense.close()
        if self.policy:
            self.policy.close()
        self.cell.close()

    def _policy(self, row: Row) -> MusclePolicy:
        if self.row is not row:
            if self.policy:
                self.policy.close()
            self.row, self.policy = row, make_policy(row, self.plan)
            check_fits(self.policy, self.cell)
        return self.policy


def make_policy(row: Row, plan: Plan) -> MusclePolicy:
    """The row's policy on its own engine, with the library built for it."""
    # A row is one setting: the shadow check would step a bad one back to a better.
    settings = Settings().with_values(shadow_every=0, **row.settings)
    model = load_model(plan.checkpoint, steps=settings.denoise_steps or None)
    processor = Processor.from_checkpoint(plan.checkpoint, model.config)
    identity = fingerprint(plan.checkpoint, model, processor, masks=mask_layout(settings, model.config))
    library = EpisodeLibrary.open(plan.out / 'libraries' / libraries.library_name(row), identity)
    engine: EagerEngine = row.engine(model, settings, len(model.config.cameras))
    return MusclePolicy(model, processor, settings, library, engine=engine)


class Timed:
    """A policy whose calls are timed in CPU time, which other programs' load leaves alone, and repeated densely where
    the difference is asked for (mean absolute, in half ranges of the actions seen in training).

    Between calls it has the references that ``budget`` allows, not those that this machine finishes in time, so that
    results do not depend on its load.
    """

    def __init__(self, policy: MusclePolicy, dense: MusclePolicy | None, scale: np.ndarray) -> None:
        self._policy, self._dense, self._scale = policy, dense, scale
        self.cpu_ms: list[float] = []
        self.errors: list[float] = []

    def __getattr__(self, name: str):
        return getattr(self._policy, name)

    def chunk_published(self, next_call_in_s: float) -> None:
        self._policy.chunk_published(math.inf)

    def infer(self, observation: Observation):
        start = time.thread_time()
        chunk = self._policy.infer(observation)
        self.cpu_ms.append(1e3 * (time.thread_time() - start))
        if self._dense:
            moved = np.abs(chunk.actions - self._dense.infer(observation).actions) / self._scale
            self.errors.append(float(moved[:self._policy.config.execute_steps].mean()))
        return chunk
