# SPDX-License-Identifier: Apache-2.0
"""One policy call, top to bottom: observe, retrieve, prefill with the Context Cache, denoise with the Action Cache."""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from rmuscle_core.engine.build import build_engine
from rmuscle_core.engine.eager import EagerEngine, Embedded
from rmuscle_core.engine.graphs import GraphEngine
from rmuscle_core.engine.plan import CallPlan, neuron_count, plan_call
from rmuscle_core.errors import LibraryError, ObservationError
from rmuscle_core.foresight import Foresight
from rmuscle_core.library import EpisodeLibrary, Reference, ReferenceId, fingerprint
from rmuscle_core.memory import MuscleMemory, Query, Recall, make_reference, rank
from rmuscle_core.model import VLA, ModelConfig, load_model
from rmuscle_core.observation import ActionChunk, CallReport, Observation
from rmuscle_core.processing import ModelInputs, Processor
from rmuscle_core.processing.units import unit_problem
from rmuscle_core.retrieval import Match, make_key
from rmuscle_core.settings import Settings
from rmuscle_core.working_set import Reading

log = logging.getLogger(__name__)

MAX_TASK = 64
START_S = 60.0  # time to expand what an episode may start with, before the policy reports ready


class MusclePolicy:
    """A vision-language-action policy with a muscle memory.

    ``infer``, ``chunk_published``, ``reset_episode`` and ``record_references`` belong to one thread, the first two in
    turn. ``settings`` may be replaced from any and takes effect at the next call, but for what the table says takes
    effect at configure: give that at construction. ``save_episode``, ``wait_ready``, ``status`` and ``problems`` may be
    used from any thread too. Whatever goes wrong with a reference, the call runs dense.
    """

    def __init__(self, model: VLA, processor: Processor, settings: Settings | None = None,
                 library: EpisodeLibrary | None = None, cameras: Collection[str] | None = None,
                 engine: EagerEngine | GraphEngine | None = None) -> None:
        self.settings = settings or Settings()
        self.model, self.config, self.processor, self.library = model, model.config, processor, library
        self.cameras = tuple(c for c in self.config.cameras if cameras is None or c in cameras)
        self.engine = engine or build_engine(model, self.settings, len(self.cameras))
        self.memory = MuscleMemory(self.engine, self.settings, library)
        self.served = {'library': 0, 'previous_call': 0, 'dense': 0}
        self._states: deque[np.ndarray] = deque(maxlen=self.settings.history)
        self.foresight = Foresight(processor, self.config)
        self.execute_steps = self.config.execute_steps  # actions of a chunk executed before the next call
        self._last: tuple[Query, Embedded, np.ndarray] | None = None
        self._library_problem = ''
        self._warned: set[str] = set()

    @classmethod
    def load(cls, checkpoint: str | Path, settings: Settings | None = None, library: str | Path | None = None,
             device: str = 'cpu', need_library: bool = False,
             cameras: Collection[str] | None = None) -> MusclePolicy:
        """Read a LeRobot-format checkpoint directory and, if given, open (or create) the library made with it.

        cameras: those of the checkpoint that this robot has, None for all. References are calls with just these; a
        call with fewer runs dense.
        Raises CheckpointError when there is no policy to run. A library that cannot be used (foreign, unreadable) is
        left alone and reported in ``problems``, and calls run without it; with need_library it raises LibraryError.
        """
        settings = settings or Settings()
        # On a GPU speed is the point: the vision tower in bfloat16 too ("rmuscle verify --numerics fast" compares).
        model = load_model(checkpoint, device=device, numerics='fast' if device.startswith('cuda') else 'lerobot',
                           weight_dtype=settings.weight_dtype)
        processor = Processor.from_checkpoint(checkpoint, model.config)
        opened, problem = None, ''
        if library:
            try:
                masks = mask_layout(settings, model.config)
                identity = fingerprint(checkpoint, model, processor, masks=masks)
                opened = EpisodeLibrary.open_or_create(library, identity)
            except LibraryError as error:
                if need_library:
                    raise
                problem = f'calls run without a library: {error}'
                log.warning(problem)
        policy = cls(model, processor, settings, opened, cameras)
        policy._library_problem = problem
        return policy

    @property
    def problems(self) -> list[str]:
        """What is wrong with the library, with single episodes or with expanding them, one sentence each."""
        own = [problem for problem in (self._library_problem, self.memory.reconstructor.problem) if problem]
        return own + (self.library.problems if self.library else [])

    def infer(self, observation: Observation) -> ActionChunk:
        """Return the action chunk for the observation.

        Raises ObservationError when the observation does not fit the checkpoint; nothing else on bad input.
        """
        settings, watch = self.settings, Stopwatch()
        with self.memory.reconstructor.policy_call():
            inputs = self._encode(observation)
            if not self._states:  # an episode's first call
                self._warn(self.processor.doubts(observation.state))
            watch.lap('process')
            embedded = self.engine.embed(inputs)
            watch.lap('embed')
            query = self._query(embedded, observation)
            recall = self.memory.recall(query, settings)
            watch.lap('retrieve')
            actions, report = self._act(embedded, recall, settings)
            watch.lap('act')
            chunk = self.processor.decode(actions.numpy(), observation)
            watch.lap('decode')
        report.milliseconds.update(watch.stages)
        report.milliseconds['total'] = sum(watch.stages.values())
        self.served[report.path] += 1
        self._last = (query, embedded, chunk)
        return ActionChunk(chunk, report, observation.stamp_s)

    def chunk_published(self, next_call_in_s: float) -> None:
        """The robot executes the last chunk from now on: record the call, use the time for likely references."""
        if self._last is None:
            return
        (query, embedded, chunk), self._last = self._last, None
        settings = self.settings
        self.memory.remember(query, embedded.visual, embedded.inputs.token_ids, chunk)
        expected = self.foresight.expect(chunk[min(self.execute_steps, len(chunk)) - 1], query.states[-1])
        self.memory.prepare(query, expected, settings, next_call_in_s)
        self.engine.prepare(settings, embedded.text)  # changed ratios are captured now, not in the next call

    def warm_up(self, prompt: str) -> None:
        """Run one dense call on a blank observation, then expand what an episode may start with; blocks."""
        side = self.config.vision.image_size
        blank = Observation({camera: np.zeros((side, side, 3), np.uint8) for camera in self.cameras},
                            self.processor.neutral_state(), prompt)
        embedded = self.engine.embed(self._encode(blank))
        self.engine.act(embedded, CallPlan(), None)
        self.engine.prepare(self.settings, embedded.text)
        self.reset_episode(prompt)
        self.wait_ready(START_S)

    @property
    def relative_actions(self) -> bool:
        """Whether the checkpoint's actions are relative to the observed state; chunks are absolute all the same."""
        return bool(self.processor.relative.any())

    def unit_problem(self, state: np.ndarray, names: Sequence[str], declared: np.ndarray) -> str:
        """Why a robot's first state [S] cannot be in the checkpoint's units, or empty; see processing/units.py."""
        return unit_problem(state, self.processor.state, names, declared)

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until the references an episode may start with are expanded; False if that takes longer."""
        return self.memory.reconstructor.wait_idle(timeout_s)

    def reset_episode(self, prompt: str) -> None:
        """Forget the running episode and prepare for the first call of the next one; does not block."""
        self._forget()
        self.memory.begin_episode(task_of(prompt), self.cameras, self.settings)

    def save_episode(self, success: bool = True) -> Future[Path]:
        """Write the running episode to the library off this thread; the future holds the file or a LibraryError."""
        return self.memory.save(success)

    def record_references(self, observations: Sequence[Observation], task: str, episode: str) -> list[Reference]:
        """Turn a recorded episode (one observation per policy call) into library entries, by dense calls."""
        self._forget()
        references = []
        for number, observation in enumerate(observations):
            embedded = self.engine.embed(self._encode(observation))
            query = self._query(embedded, observation)
            actions, _ = self.engine.act(embedded, CallPlan(), None)
            reference = make_reference(ReferenceId(task, episode, number), query, embedded.visual,
                                       embedded.inputs.token_ids, self.processor.decode(actions.numpy(), observation))
            references.append(replace(reference, neurons=rank(self.engine, reference)))
        self._forget()
        return references

    def status(self) -> dict[str, int]:
        """Counters for CacheStatus."""
        return {'library_entries': len(self.library.index().ids) if self.library else 0,
                'library_bytes': self.library.nbytes if self.library else 0,
                'slots_ready': len(self.memory.working_set.ready()), 'slots': len(self.memory.working_set),
                'working_set_bytes': self.engine.arena.nbytes,
                **{f'served_{path}': count for path, count in self.served.items()}}

    def close(self) -> bool:
        """Stop the reconstruct thread; True if it has ended."""
        return self.memory.reconstructor.close()

    def _encode(self, observation: Observation) -> ModelInputs:
        inputs = self.processor.encode(observation)
        other = [view for view in inputs.views if view not in self.cameras]
        if other:
            raise ObservationError(f'camera {other[0]!r} is not among those this policy was loaded for '
                                   f'({", ".join(self.cameras)}); load it with that camera, or leave the picture out')
        return inputs

    def _warn(self, doubts: list[str]) -> None:
        for doubt in doubts:
            if doubt not in self._warned:
                self._warned.add(doubt)
                log.warning(doubt)

    def _forget(self) -> None:
        self._states.clear()
        self.foresight.forget()
        self._last = None

    def _query(self, embedded: Embedded, observation: Observation) -> Query:
        self._states.append(embedded.inputs.state_normalized)
        self.foresight.observe(embedded.inputs.state_normalized)
        views = embedded.inputs.views
        return Query(make_key(embedded.visual, views), np.stack(self._states), task_of(observation.prompt), views)

    def _act(self, embedded: Embedded, recall: Recall, settings: Settings) -> tuple[torch.Tensor, CallReport]:
        """Compute the actions on the path the memory offers, or dense when it no longer holds."""
        neurons, match = self.config.expert.mlp, recall.match
        report = CallReport(settings.mode, recall.path, recall.reason, tokens=embedded.tokens, neurons=neurons)
        plan = plan_call(settings, self.config, embedded.tokens, embedded.text)
        with self.memory.working_set.reading(match.id if match else None) as reading:
            if match and reading is None:
                report.path, report.reason = 'dense', f'{match.id} was replaced while it was matched'
            if reading is None:
                plan = CallPlan()
            elif plan.neurons is not None:
                refusal = self._no_action_cache(plan, match, reading, settings)
                if refusal:
                    plan = CallPlan(tokens=plan.tokens)
                    report.reason += f'; denoising ran dense, {refusal}'
            actions, stages = self.engine.act(embedded, plan, reading.slot if reading else None)
        if reading and not torch.isfinite(actions).all():
            self.memory.quarantine(match.id)
            report.path, report.reason = 'dense', f'{match.id} led to a non-finite action and is out of use'
            plan = CallPlan()
            actions, stages = self.engine.act(embedded, plan, None)
        if report.path != 'dense':
            report.reference, report.similarity = str(match.id), match.similarity
        report.tokens_recomputed = embedded.tokens if plan.tokens is None else plan.tokens
        report.neurons_evaluated = plan.mean_neurons(neurons, self.config.steps, settings.group_size)
        report.milliseconds = dict(stages)
        return actions, report

    @staticmethod
    def _no_action_cache(plan: CallPlan, match: Match, reading: Reading, settings: Settings) -> str:
        """Why the Action Cache may not use this reference; empty if it may."""
        if match.similarity < settings.action_similarity:
            return f'since similarity {match.similarity:.2f} is below action_similarity {settings.action_similarity:g}'
        if plan.stored_residual and reading.residual_neurons != plan.neurons:
            return 'until its residual is rebuilt for the new neuron_ratio'
        return ''


class Stopwatch:
    """Wall milliseconds between laps."""

    def __init__(self) -> None:
        self.stages: dict[str, float] = {}
        self._since = time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.stages[stage], self._since = 1e3 * (now - self._since), now


def mask_layout(settings: Settings, config: ModelConfig) -> str:
    """What a library's neuron masks must agree in with the arena that takes them."""
    masked = neuron_count(settings.mask_ratio, config.expert.mlp)
    return f'{masked} of {config.expert.mlp} neurons per {settings.group_size} steps'


def task_of(prompt: str) -> str:
    """The task a prompt names, as it is written in reference ids and folder names; at most 64 characters."""
    slug = re.sub(r'[^a-z0-9]+', '-', prompt.lower()).strip('-') or 'task'
    if len(slug) <= MAX_TASK:
        return slug
    return f'{slug[:MAX_TASK - 9]}-{hashlib.blake2b(slug.encode(), digest_size=4).hexdigest()}'
