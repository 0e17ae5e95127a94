# SPDX-License-Identifier: Apache-2.0
"""The muscle memory: what earlier calls left, which of it fits now, and what to prepare for the next call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from rmuscle_core.engine.eager import EagerEngine
from rmuscle_core.engine.graphs import GraphEngine
from rmuscle_core.engine.lane import go_on
from rmuscle_core.engine.plan import plan_call
from rmuscle_core.errors import EpisodeError, LibraryError
from rmuscle_core.library import EpisodeLibrary, Reference, ReferenceId
from rmuscle_core.reconstruct import Reconstructor
from rmuscle_core.retrieval import Match, Retriever
from rmuscle_core.settings import Settings
from rmuscle_core.working_set import WorkingSet

EPISODE_CALLS = 200  # that can be saved; five times the longest executions of the paper

@dataclass(frozen=True)
class Query:
    """What a call is compared by: key float32 [V, C], states float32 [h, S] normalised, newest last."""

    key: np.ndarray
    states: np.ndarray
    task: str
    views: tuple[str, ...]


@dataclass(frozen=True)
class Recall:
    """Outcome of the fallback ladder: the path that may serve this call, the reason, and the reference if any."""

    path: str
    reason: str
    match: Match | None = None


class MuscleMemory:
    """References of the library and of the running episode, expanded in time for the calls that need them.

    ``recall``, ``remember``, ``prepare``, ``begin_episode`` and ``quarantine`` belong to the inference thread, which
    replaces what it keeps as a whole and never changes it in place; expansion and saving run on the reconstructor's.
    """

    def __init__(self, engine: EagerEngine | GraphEngine, settings: Settings, library: EpisodeLibrary | None) -> None:
        self.engine, self.settings, self.library = engine, settings, library
        self.retriever = Retriever(library.index() if library else None, settings)
        self.working_set = WorkingSet(settings.slots)
        self.episode: list[Reference] = []
        self._episode_name = 'running-0'
        self._ranked: dict[ReferenceId, np.ndarray] = {}  # of the running episode, so that saving need not rank again
        self.quarantined: frozenset[ReferenceId] = frozenset()
        self.reconstructor = Reconstructor(self._expand)

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
        if settings.reference_source == 'library':
            stored = [r for r in ready if r not in own]
            match = self.retriever.match(query.key, query.states, stored, query.task, query.views)
            if match:
                return Recall('library', f'most similar of {len(stored)} ready', match)
        previous = self.episode[-1] if self.episode else None
        if previous and previous.id in ready and previous.views == query.views:
            match = self.retriever.compare(query.key, query.states, previous)
            if match.similarity >= settings.min_similarity:
                return Recall('previous_call', 'no library reference was similar enough or ready', match)
        return Recall('dense', f'none of {len(ready)} ready references reaches similarity {settings.min_similarity:g}')

    def remember(self, query: Query, prefix: torch.Tensor, token_ids: torch.Tensor, chunk: np.ndarray) -> None:
        """Record the call just executed: prefix [T, D] visual embeddings, token_ids [P], chunk float32 [H, A]."""
        number = self.episode[-1].id.call + 1 if self.episode else 0
        identity = ReferenceId(query.task, self._episode_name, number)
        if self.library is None or len(self.episode) == EPISODE_CALLS:
            self.episode, self._ranked = [], {}  # a robot that never begins an episode must not fill the memory
        self.episode = [*self.episode, make_reference(identity, query, prefix, token_ids, chunk)]

    def prepare(self, query: Query, expected: np.ndarray | None, settings: Settings, seconds: float) -> None:
        """Open the reconstructor's interval for the references the next call is likely to need.

        expected: normalised state [S] foretold for the next call, or None to go by the present call alone.
        """
        self.settings = self.retriever.settings = settings
        wanted = []
        if settings.mode != 'dense' and settings.reference_source == 'library':
            if expected is None:
                nearest = self.retriever.nearest(query.key, query.states, query.task, query.views)
                wanted += self.retriever.candidates(nearest, query.task, query.views)
            else:
                wanted += self.retriever.ahead(query.key, query.states, expected, query.task, query.views)
        if settings.mode != 'dense' and settings.reference_source != 'none' and self.episode:
            wanted.append(self.episode[-1].id)
        self.reconstructor.open_interval(wanted, seconds, settings.budget)

    def begin_episode(self, task: str, views: tuple[str, ...], settings: Settings) -> None:
        """Forget the running episode and expand what the first call of the next one may need; does not block."""
        self.settings = settings
        for reference in self.episode:
            self.working_set.drop(reference.id)
        self.episode, self._ranked = [], {}
        self._episode_name = f'running-{int(self._episode_name.split("-")[1]) + 1}'
        wanted = []
        if settings.mode != 'dense' and settings.reference_source == 'library':
            wanted = self.retriever.candidates(None, task, views)[:settings.slots]
        self.reconstructor.open_interval(wanted, float('inf'), settings.slots)

    def quarantine(self, reference: ReferenceId) -> None:
        """Never use this reference again in this process: it led to a non-finite result."""
        self.quarantined |= {reference}
        self.working_set.drop(reference)

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
            ranked = [self._with_neurons(r, checkpoint) for r in episode]
            path = self.library.add_episode(episode[0].id.task, ranked, success=success)
            self.retriever.use(self.library.index())
            return path

        return self.reconstructor.submit(write)

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
        settings, config, shape = self.settings, self.engine.model.config, self.engine.arena.shape
        plan = plan_call(settings, config, shape.tokens, 0)
        residual_neurons = plan.neurons if plan.stored_residual else None
        if identity in self.quarantined or self.working_set.has(identity, residual_neurons):
            return False
        reference = self._find(identity)
        if reference is None or reference.prefix.shape[0] != shape.tokens:
            return False  # of an episode that ended meanwhile, or seen without all cameras, which slots have room for
        reference = self._with_neurons(reference, checkpoint)
        slot = self.working_set.claim(identity, wanted)
        if slot is None:
            return False
        try:
            self.engine.expand(reference, slot, torch.from_numpy(reference.neurons.astype(np.int32)), plan, checkpoint)
        except BaseException:
            self.working_set.abandon(slot)
            raise
        self.working_set.commit(slot, residual_neurons)
        return True

    def _find(self, identity: ReferenceId) -> Reference | None:
        own = next((r for r in self.episode if r.id == identity), None)
        if own or identity.episode.startswith('running-'):
            return own
        try:
            return self.library.load(identity)
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
