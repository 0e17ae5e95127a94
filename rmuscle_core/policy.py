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
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from rmuscle_core.acting import Actor
from rmuscle_core.engine.build import build_engine
from rmuscle_core.engine.eager import EagerEngine, Embedded
from rmuscle_core.engine.faults import device_failures, room_for
from rmuscle_core.engine.graphs import GraphEngine
from rmuscle_core.engine.plan import CallPlan
from rmuscle_core.engine.probe import require_torch_kernels
from rmuscle_core.engine.spread import neuron_count
from rmuscle_core.errors import LibraryError, ObservationError
from rmuscle_core.foresight import Foresight
from rmuscle_core.library import EpisodeLibrary, Reference, ReferenceId, fingerprint
from rmuscle_core.library.fitting import library_widths
from rmuscle_core.memory import MuscleMemory, Query, make_reference, rank
from rmuscle_core.model import VLA, ModelConfig, load_model
from rmuscle_core.observation import ActionChunk, Leftover, Observation
from rmuscle_core.processing import ModelInputs, Processor
from rmuscle_core.processing.units import unit_problem
from rmuscle_core.realtime import guidance_of
from rmuscle_core.retrieval import make_key
from rmuscle_core.settings import Settings
from rmuscle_core.shadow import ShadowCheck

log = logging.getLogger(__name__)

MAX_TASK = 64
START_S = 60.0  # time to expand what an episode may start with, before the policy reports ready


@dataclass(frozen=True)
class _Call:
    """What is needed of a call once it is out. actions float32 [H, A_pad] normalised, chunk [H, A] in robot units."""

    query: Query
    embedded: Embedded
    actions: torch.Tensor
    chunk: np.ndarray
    path: str


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
        self.actor = Actor(self.engine, self.memory)
        self.shadow = ShadowCheck(self.engine)
        self.served = {'library': 0, 'previous_call': 0, 'dense': 0}
        self._states: deque[np.ndarray] = deque(maxlen=self.settings.history)
        self.foresight = Foresight(processor, self.config)
        self.execute_steps = self.config.execute_steps  # actions of a chunk executed before the next call
        self._last: _Call | None = None
        self._library_problem = ''
        self._warned: set[str] = set()

    @classmethod
    def load(cls, checkpoint: str | Path, settings: Settings | None = None, library: str | Path | None = None,
             device: str = 'cpu', need_library: bool = False,
             cameras: Collection[str] | None = None, joints: Sequence[str] = ()) -> MusclePolicy:
        """Read a LeRobot-format checkpoint directory and, if given, open (or create) the library made with it.

        cameras: those of the checkpoint that this robot has, None for all. References are calls with just these; a
        call with fewer runs dense. joints: names in the order of the state, so that a library recorded with another
        order is refused; empty when unknown.
        Raises CheckpointError when there is no policy to run. A library that cannot be used (foreign, unreadable) is
        left alone and reported in ``problems``, and calls run without it; with need_library it raises LibraryError.
        """
        settings = settings or Settings()
        require_torch_kernels(device)
        # On a GPU speed is the point: the vision tower in bfloat16 too ("rmuscle verify --numerics fast" compares).
        with device_failures(), room_for(f'the weights of {checkpoint} on {device}'):
            model = load_model(checkpoint, device=device, numerics='fast' if device.startswith('cuda') else 'lerobot',
                               weight_dtype=settings.weight_dtype, steps=settings.denoise_steps or None)
        processor = Processor.from_checkpoint(checkpoint, model.config)
        processor.announce()
        opened, problem = None, ''
        if library:
            try:
                masks = mask_layout(settings, model.config)
                identity = fingerprint(checkpoint, model, processor, masks=masks, joints=' '.join(joints))
                opened = EpisodeLibrary.open_or_create(library, identity, library_widths(model.config))
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
        own = [problem for problem in (self._library_problem, self.shadow.problem) if problem]
        return own + self.engine.problems + self.memory.problems + (self.library.problems if self.library else [])

    @device_failures()
    def infer(self, observation: Observation, leftover: Leftover | None = None) -> ActionChunk:
        """Return the action chunk for the observation; with ``leftover`` and rtc on, one that continues it.

        Raises ObservationError when the observation does not fit the checkpoint; nothing else on bad input. Raises
        DeviceError when the device is lost, and RMuscleError when it has no memory even for a dense call.
        """
        settings, watch = self.shadow.temper(self.settings), Stopwatch()
        with self.memory.reconstructor.policy_call():
            guidance = guidance_of(leftover, observation, self.processor, self.config, settings)
            inputs = replace(self._encode(observation), guidance=guidance)
            self._notice_task(observation.prompt)
            if not self._states:  # an episode's first call
                self._warn(self.processor.doubts(observation.state))
            watch.lap('process')
            embedded = self.actor.afford(lambda: self.engine.embed(inputs))
            query = self._query(embedded, observation)  # waits for the device
            watch.lap('embed')
            recall = self.memory.recall(query, settings)
            watch.lap('retrieve')
            actions, report = self.actor.act(embedded, recall, settings)
            watch.lap('act')
            chunk = self.processor.decode(actions.numpy(), observation)
            report.guided = guidance is not None
            watch.lap('decode')
        report.milliseconds.update(watch.stages)
        report.milliseconds['total'] = sum(watch.stages.values())
        self.served[report.path] += 1
        self._last = _Call(query, embedded, actions, chunk, report.path)
        return ActionChunk(chunk, report, observation.stamp_s)

    @device_failures()
    def chunk_published(self, next_call_in_s: float) -> None:
        """The robot executes the last chunk from now on: record the call, use the time for likely references."""
        if self._last is None:
            return
        last, self._last = self._last, None
        query, embedded, chunk, settings = last.query, last.embedded, last.chunk, self.shadow.temper(self.settings)
        self.memory.remember(query, embedded.visual, embedded.inputs.token_ids, chunk)
        expected = self.foresight.expect(chunk[min(self.execute_steps, len(chunk)) - 1], query.states[-1])
        spare = self.shadow.offer(embedded, last.actions, last.path, self.execute_steps)
        self.memory.prepare(query, expected, settings, next_call_in_s, spare)
        # Changed ratios are captured now, not in the next call.
        self.actor.afford(lambda: self.engine.prepare(settings, embedded.text))

    @device_failures()
    def warm_up(self, prompt: str) -> None:
        """Run one dense call on a blank observation, then expand what an episode may start with; blocks."""
        side = self.config.vision.image_size
        blank = Observation({camera: np.zeros((side, side, 3), np.uint8) for camera in self.cameras},
                            self.processor.neutral_state(), prompt)
        inputs = self._encode(blank)
        embedded = self.actor.afford(lambda: self.engine.embed(inputs))
        self.actor.afford(lambda: self.engine.act(embedded, CallPlan(), None))
        self.actor.afford(lambda: self.engine.prepare(self.settings, embedded.text))
        self.reset_episode(prompt)
        self.wait_ready(START_S)

    @property
    def relative_actions(self) -> bool:
        """Whether the checkpoint's actions are relative to the observed state; chunks are absolute all the same."""
        return self.processor.report()['relative actions'] != 'none'

    def unit_problem(self, state: np.ndarray, names: Sequence[str], declared: np.ndarray) -> str:
        """Why a robot's first state [S] cannot be in the checkpoint's units, or empty; see processing/units.py."""
        trained = self.processor.state.unnormalize(self.processor.normalize_state(state))
        return unit_problem(trained, self.processor.state, names, declared)

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until the references an episode may start with are expanded; False if that takes longer."""
        return self.memory.reconstructor.wait_idle(timeout_s)

    def reset_episode(self, prompt: str) -> None:
        """Forget the running episode and prepare for the first call of the next one; does not block."""
        self._forget()
        self.shadow.begin_episode()
        self.memory.begin_episode(task_of(prompt), self.cameras, self.shadow.temper(self.settings))

    def reload_library(self) -> Future[int]:
        """Read the library's folder again off this thread; the future holds the number of episodes in it."""
        return self.memory.reload()

    def save_episode(self, success: bool = True) -> Future[Path]:
        """Write the running episode to the library off this thread; the future holds the file or a LibraryError."""
        return self.memory.save(success)

    @device_failures()
    def record_references(self, observations: Sequence[Observation], task: str, episode: str) -> list[Reference]:
        """Turn a recorded episode (one observation per policy call) into library entries, by dense calls."""
        self._forget()
        self.memory.reconstructor.open_interval([], 0.0, 0)  # it computes where rankings are computed
        self.memory.reconstructor.wait_idle()
        references = []
        for number, observation in enumerate(observations):
            inputs = self._encode(observation)
            embedded = self.actor.afford(lambda inputs=inputs: self.engine.embed(inputs))
            query = self._query(embedded, observation)
            actions, _ = self.actor.afford(lambda embedded=embedded: self.engine.act(embedded, CallPlan(), None))
            reference = make_reference(ReferenceId(task, episode, number), query, embedded.visual,
                                       embedded.inputs.token_ids, self.processor.decode(actions.numpy(), observation))
            references.append(replace(reference, neurons=rank(self.engine, reference)))
        self._forget()
        return references

    def status(self) -> dict[str, float]:
        """Counters for CacheStatus."""
        return {'library_entries': len(self.library.index().ids) if self.library else 0,
                'library_bytes': self.library.nbytes if self.library else 0,
                'slots_ready': len(self.memory.working_set.ready()), 'slots': len(self.memory.working_set),
                'working_set_bytes': self.engine.arena.nbytes, 'out_of_memory': self.memory.out_of_memory,
                'quarantined': len(self.memory.quarantined),
                'shadow_difference': self.shadow.difference, 'shadow_checks': self.shadow.checks,
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

    def _notice_task(self, prompt: str) -> None:
        """An episode is of one task: with another instruction the next one begins."""
        running = self.memory.episode
        if running and running[-1].id.task != task_of(prompt):
            self.reset_episode(prompt)

    def _warn(self, doubts: dict[str, str]) -> None:
        for subject, doubt in doubts.items():
            if subject not in self._warned:
                self._warned.add(subject)
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
