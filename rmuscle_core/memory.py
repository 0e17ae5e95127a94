# SPDX-License-Identifier: Apache-2.0
"""The muscle memory: what earlier calls left, which of it fits now, and what to prepare for the next call."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from rmuscle_core.engine.eager import EagerEngine
from rmuscle_core.engine.faults import device_failed, out_of_memory
from rmuscle_core.engine.graphs import GraphEngine
from rmuscle_core.engine.lane import go_on
from rmuscle_core.engine.plan import CallPlan, plan_call
from rmuscle_core.errors import EpisodeError, LibraryError
from rmuscle_core.ffn import Interrupted
from rmuscle_core.library import EpisodeLibrary, Reference, ReferenceId
from rmuscle_core.library.fitting import check_fits, fault
from rmuscle_core.reconstruct import Reconstructor
from rmuscle_core.retrieval import Match, Retriever
from rmuscle_core.settings import Settings
from rmuscle_core.working_set import WorkingSet

EPISODE_CALLS = 200  # that can be saved; five times the longest executions of the paper
RUNNING = 'running-~'  # begins the names of episodes in memory, which no episode on disk can have
YIELD_S = 10.0  # for a layer of an expansion to end
TOLD = 8  # references out of use that are reported one by one
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Query:
    """What a call is compared by: key float32 [V, C], states float32 [h, S] normalised, newest last."""

    key: np.ndarray
    states: np.ndarray
    task: str
    views: tuple[str, ...]


@dataclass(frozen=True)
class Recall:
    """Outcome of the fallback ladder: the path that may serve this call, the reason, and the reference if any.

    donors: further references whose prefix outputs tokens may reuse, most useful first.
    """

    path: str
    reason: str
    match: Match | None = None
    donors: tuple[ReferenceId, ...] = ()


class MuscleMemory:
    """References of the library and of the running episode, expanded in time for the calls that need them.

    ``recall``, ``remember``, ``prepare``, ``begin_episode`` and ``shrink`` belong to the inference thread, which
    replaces what it keeps as a whole and never changes it in place; expansion and saving run on the reconstructor's.
    quarantined: references that are never used again in this process, and why. out_of_memory: how often it ran out.
    """

    def __init__(self, engine: EagerEngine | GraphEngine, settings: Settings, library: EpisodeLibrary | None) -> None:
        self.engine, self.settings, self.library = engine, settings, library
        self.retriever = Retriever(library.index() if library else None, settings)
        self.working_set = WorkingSet(engine.arena.slots)
        self.episode: list[Reference] = []
        self._episodes = 0
        self._ranked: dict[ReferenceId, np.ndarray] = {}  # of the running episode, so that saving need not rank again
        self.quarantined: dict[ReferenceId, str] = {}  # either thread adds single entries
        self.out_of_memory = 0
        self._library_serves = False  # the library has candidates for the next call
        self._short = False  # an expansion found no memory; nothing is expanded until the inference thread shrinks
        self.reconstructor = Reconstructor(self._expand)

    @property
    def problems(self) -> list[str]:
        """Why calls have fewer references than they could, one sentence each."""
        out = [f'{reference} is out of use: {why}' for reference, why in dict(self.quarantined).items()]
        if len(out) > TOLD:
            out = [*out[:TOLD], f'{len(out) - TOLD} more references are out of use; record the task again']
        if self.out_of_memory:
            out.append(f'memory ran out {self.out_of_memory} times and {len(self.working_set)} of '
                       f'{self.settings.slots} reference slots are left, so fewer calls are served by references; free '
                       'memory on the device, lower slots or set sketch_width')
        return out + ([self.reconstructor.problem] if self.reconstructor.problem else [])

    def recall(self, query: Query, settings: Settings) -> Recall:
        """Choose among ready references: the library's, then the previous call, then none (dense)."""
        if settings.mode == 'dense' or settings.reference_source == 'none':
            return Recall('dense', f'mode is {settings.mode}, reference_source is {settings.reference_source}')
        config = self.engine.model.config
        if len(query.views) * config.vision.tokens != self.engine.arena.shape.tokens:
            return Recall('dense', f'the call has only camera {", ".join(query.views)}, references have more')
        self.retriever.settings = settings
        ready = self.working_set.ready()
        own = {r.id for r in self.episode}
        previous = self.episode[-1] if self.episode else None
        if previous and (previous.id not in ready or previous.views != query.views):
            previous = None
        if settings.reference_source == 'library':
            stored = [r for r in ready if r not in own]
            match = self.retriever.match(query.key, query.states, stored, query.task, query.views)
            if match:
                self.library.used(match.id)
                # The call before has this day's light and this episode's object: what stood still comes from there.
                donors = (*([previous.id] if previous else ()), *match.rivals[1:])[:settings.token_references - 1]
                return Recall('library', f'most similar of {len(stored)} ready', match, donors)
        if previous:
            match = self.retriever.compare(query.key, query.states, previous)
            if match.similarity >= settings.min_similarity:
                why = ('no library reference was similar enough or ready' if settings.reference_source == 'library'
                       else 'reference_source is previous_call')
                return Recall('previous_call', why, match)
        return Recall('dense', f'none of {len(ready)} ready references reaches similarity {settings.min_similarity:g}')

    def remember(self, query: Query, prefix: torch.Tensor, token_ids: torch.Tensor, chunk: np.ndarray) -> None:
        """Record the call just executed: prefix [T, D] visual embeddings, token_ids [P], chunk float32 [H, A]."""
        number = self.episode[-1].id.call + 1 if self.episode else 0
        identity = ReferenceId(query.task, f'{RUNNING}{self._episodes}', number)
        if self.library is None or len(self.episode) == EPISODE_CALLS:
            self._forget_episode()  # a robot that never begins one must not fill the memory
        self.episode = [*self.episode, make_reference(identity, query, prefix, token_ids, chunk)]

    def prepare(self, query: Query, expected: np.ndarray | None, settings: Settings, seconds: float,
                spare: Callable[[Callable[[], None]], None] | None = None) -> None:
        """Open the reconstructor's interval for the references the next call is likely to need.

        expected: normalised state [S] foretold for the next call, or None to go by the present call alone. spare: what
        is to be done with the time that is left.
        """
        self.settings = self.retriever.settings = settings
        if self._short:
            self.shrink()
        wanted = []
        if settings.mode != 'dense' and settings.reference_source == 'library':
            if expected is None:
                nearest = self.retriever.nearest(query.key, query.states, query.task, query.views)
                wanted += self.retriever.candidates(nearest, query.task, query.views)
            else:
                wanted += self.retriever.ahead(query.key, query.states, expected, query.task, query.views)
        self._library_serves = bool(wanted)
        if settings.mode != 'dense' and settings.reference_source != 'none' and self.episode:
            wanted.insert(1, self.episode[-1].id)
        self.reconstructor.open_interval(wanted, seconds, settings.budget, spare)

    def begin_episode(self, task: str, views: tuple[str, ...], settings: Settings) -> None:
        """Forget the running episode and expand what the first call of the next one may need; does not block."""
        self.settings = settings
        if self._short:
            self.shrink()
        self._forget_episode()
        self._episodes += 1
        wanted = []
        if settings.mode != 'dense' and settings.reference_source == 'library':
            wanted = self.retriever.candidates(None, task, views)[:len(self.working_set)]
        self.reconstructor.open_interval(wanted, float('inf'), len(self.working_set))

    def quarantine(self, reference: ReferenceId, why: str) -> None:
        """Never use this reference again in this process. Either thread may find that out."""
        self.quarantined[reference] = why
        self.working_set.drop(reference)
        log.warning(f'{reference} is out of use: {why}')

    def shrink(self) -> None:
        """Memory ran out: give up half of the slots, and what the others hold with them; 0 leaves dense calls.

        Called between calls or within one, with no slot being read.
        """
        self.out_of_memory += 1
        with self.reconstructor.policy_call():
            if self.reconstructor.wait_yielded(YIELD_S):
                self.working_set = WorkingSet(len(self.working_set) // 2)
                self.engine.shrink(len(self.working_set))
                self._short = False
        log.warning(f'memory ran out; {len(self.working_set)} reference slots are left')

    def reload(self) -> Future[int]:
        """Take in what appeared in the library's folder and forget what went; the future holds the episodes there."""
        def refresh(_checkpoint: Callable[[], None]) -> int:
            if self.library is None:
                raise LibraryError('there is no library to read again; set the parameter library')
            self.library.refresh(again=True)
            self.retriever.use(self.library.index())
            return len(self.library.episodes)

        return self.reconstructor.submit(refresh)

    def save(self, success: bool) -> Future[Path]:
        """Write the running episode to the library on the reconstruct thread; the future holds the file's path."""
        episode = self.episode

        def write(checkpoint: Callable[[], None]) -> Path:
            if self.library is None:
                raise LibraryError('there is no library to save the episode to; set the parameter library')
            if not episode:
                raise LibraryError('this episode has no executed policy calls; save it after its last chunk')
            if episode[0].id.call > 0:
                raise LibraryError(f'this episode is longer than {EPISODE_CALLS} policy calls and its beginning is '
                                   'forgotten; call reset_episode between executions')
            try:
                ranked = [self._with_neurons(r, checkpoint) for r in episode]
            except Exception as error:
                if not out_of_memory(error):
                    raise
                self._short = True
                raise LibraryError('memory ran out while the episode was prepared for saving; save it again after the '
                                   'next call, when slots have been given up') from error
            path = self.library.add_episode(episode[0].id.task, ranked, success=success)
            self.library.evict(self.settings.library_capacity * 10**6, keep=path)
            self.retriever.use(self.library.index())
            return path

        return self.reconstructor.submit(write)

    def _forget_episode(self) -> None:
        for reference in self.episode:
            self.working_set.drop(reference.id)
        self.episode, self._ranked = [], {}

    def _with_neurons(self, reference: Reference, checkpoint: Callable[[], None]) -> Reference:
        """The reference with its neuron ranking, computed by one dense denoising if it has none."""
        if reference.neurons is not None:
            return reference
        ranked = self._ranked  # the inference thread may begin an episode, with a table of its own, meanwhile
        if reference.id not in ranked:
            ranked[reference.id] = rank(self.engine, reference, checkpoint)
        return replace(reference, neurons=ranked[reference.id])

    def _expand(self, identity: ReferenceId, wanted: Sequence[ReferenceId], checkpoint: Callable[[], None]) -> bool:
        """Make the reference ready; False if it is already, every slot holds something more likely, or none fits it."""
        if self._short or identity in self.quarantined or not len(self.working_set):
            return False
        try:
            return self._make_ready(identity, wanted, checkpoint)
        except (Interrupted, EpisodeError):
            raise
        except Exception as error:
            if out_of_memory(error):
                self._short = True
                log.warning(f'memory ran out while {identity} was expanded: {error}')
                return False
            if not device_failed(error):  # it may be the reference's fault, and there are others
                self.quarantine(identity, f'expanding it failed ({type(error).__name__}: {error})')
            raise

    def _make_ready(self, identity: ReferenceId, wanted: Sequence[ReferenceId],
                    checkpoint: Callable[[], None]) -> bool:
        settings, config, shape, working_set = (self.settings, self.engine.model.config, self.engine.arena.shape,
                                                self.working_set)
        plan = plan_call(settings, config, shape.tokens, 0)
        if self._library_serves and plan.tokens is not None and identity.episode.startswith(RUNNING):
            plan = CallPlan(plan.tokens)  # it gives tokens; for the Action Cache there are better ones
        residual_neurons = plan.neurons if plan.stored_residual or plan.neurons is None else 0
        if working_set.has(identity, residual_neurons):
            return False
        reference = self._find(identity)
        if reference is None:
            return False  # of an episode that ended meanwhile
        why = fault(reference, config)
        if why:
            self.quarantine(identity, why)
            return False
        if reference.prefix.shape[0] != shape.tokens:
            return False  # seen without all cameras, which slots have room for
        neurons = None
        if plan.neurons is not None:
            reference = self._with_neurons(reference, checkpoint)
        if reference.neurons is not None:
            neurons = torch.from_numpy(reference.neurons.astype(np.int32))
            residual_neurons = residual_neurons or 0
        slot = working_set.claim(identity, wanted)
        if slot is None:
            return False
        try:
            self.engine.expand(reference, slot, neurons, plan, checkpoint)
        except BaseException:
            working_set.abandon(slot)
            raise
        working_set.commit(slot, residual_neurons)
        return True

    def _find(self, identity: ReferenceId) -> Reference | None:
        own = next((r for r in self.episode if r.id == identity), None)
        if own or identity.episode.startswith(RUNNING):
            return own
        try:
            config, shape = self.engine.model.config, self.engine.arena.shape
            return self.library.load(identity, lambda reference: check_fits(reference, config, shape))
        except EpisodeError:
            self.retriever.use(self.library.index())  # the file is out of use; so are the episode's other calls
            raise


def rank(engine: EagerEngine | GraphEngine, reference: Reference, checkpoint: Callable[[], None] = go_on) -> np.ndarray:
    """The reference's neurons, most important first, as a library keeps them: uint16 [G, M, masked]."""
    return engine.rank_neurons(reference, checkpoint).numpy().astype(np.uint16)


def make_reference(identity: ReferenceId, query: Query, prefix: torch.Tensor, token_ids: torch.Tensor,
                   chunk: np.ndarray) -> Reference:
    """A compact reference without neuron ranking; prefix and ids are copied to the host."""
    ids = token_ids.cpu().numpy().astype(np.int32)
    return Reference(id=identity, prefix=prefix.to('cpu', torch.bfloat16), token_ids=ids, states=query.states,
                     key=query.key, neurons=None, chunk=chunk, views=query.views)
