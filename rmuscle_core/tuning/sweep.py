# SPDX-License-Identifier: Apache-2.0
"""Every setting on every recorded call: how far the actions move from the dense ones, and what the call costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from rmuscle_core.bench.roofline import Peaks
from rmuscle_core.engine.eager import Embedded
from rmuscle_core.engine.plan import CallPlan, plan_call
from rmuscle_core.errors import EpisodeError
from rmuscle_core.library import Reference, ReferenceId
from rmuscle_core.library.recording import RecordedEpisode
from rmuscle_core.policy import MusclePolicy, task_of
from rmuscle_core.processing import ModelInputs
from rmuscle_core.replay.measures import half_ranges
from rmuscle_core.retrieval import Match, Retriever
from rmuscle_core.tuning.cost import Cost

TOKENS, NEURONS, WINDOWS = (0.1, 0.15, 0.25, 0.35, 0.5, 0.75, 1.0), (0.25, 0.35, 0.5, 0.65, 0.75, 1.0), (0, 1, 2)


@dataclass(frozen=True)
class Grid:
    tokens: Sequence[float] = TOKENS
    neurons: Sequence[float] = NEURONS
    windows: Sequence[int] = WINDOWS


@dataclass(frozen=True)
class Sweep:
    """errors [calls, windows, tokens, neurons]: mean |cached - dense| over executed steps and joints, half ranges.

    milliseconds [windows, tokens, neurons]: mean cost of a call, fallbacks included. episodes [calls]: which episode a
    call is of. similarity [windows]: of the reference served, mean. dense_ms: of a dense call.
    """

    grid: Grid
    errors: np.ndarray
    milliseconds: np.ndarray
    episodes: np.ndarray
    similarity: np.ndarray
    dense_ms: float


@dataclass(frozen=True)
class _Call:
    episode: int
    inputs: ModelInputs
    reference: Reference  # what this call would leave in a library: its key, states and dense chunk
    error: Callable[[torch.Tensor], float]  # of the engine's actions


def sweep(policy: MusclePolicy, episodes: Sequence[RecordedEpisode], grid: Grid, executed: int,
          peaks: Peaks | None = None, progress: Callable[[int, int], None] = lambda done, total: None) -> Sweep:
    """Replay the episodes at every setting, with references of the policy's library.

    A window changes which reference is ready, so it is asked of the retriever; ratios are then computed for the
    references that came up. peaks: predict the cost for that device instead of measuring it here.
    Raises EpisodeError when there is nothing to replay.
    """
    calls = [call for number, episode in enumerate(episodes)
             for call in _dense_calls(policy, number, episode, executed)]
    if not calls:
        raise EpisodeError('no episode is left to try settings on; record more')
    matches = [[_match(policy, calls, i, window) for window in grid.windows] for i in range(len(calls))]
    cost = Cost(policy, calls[0].inputs, peaks)
    shape = len(calls), len(grid.windows), len(grid.tokens), len(grid.neurons)
    errors, plans = np.zeros(shape), np.full(shape, CallPlan(), object)
    for i, call in enumerate(calls):
        tried: dict[tuple[tuple[ReferenceId, ...], bool], tuple[np.ndarray, np.ndarray]] = {}
        cost.run_dense(call.inputs)
        for w, match in enumerate(matches[i]):
            if match is None:  # the call runs dense
                continue
            action_cache = match.similarity >= policy.settings.action_similarity
            key = match.rivals[:policy.settings.token_references], action_cache
            if key not in tried:
                tried[key] = _try_all(policy, call, _before(calls, i), *key, grid, cost)
            errors[i, w], plans[i, w] = tried[key]
        progress(i + 1, len(calls))
    similar = [[match.similarity if match else 0.0 for match in row] for row in matches]
    milliseconds = {plan: cost.of(plan) for plan in {CallPlan(), *plans.flat}}
    spent = np.array([milliseconds[plan] for plan in plans.flat]).reshape(shape).mean(0)
    return Sweep(grid, errors, spent, np.array([call.episode for call in calls]), np.mean(similar, axis=0),
                 milliseconds[CallPlan()])


def _dense_calls(policy: MusclePolicy, number: int, episode: RecordedEpisode, executed: int) -> Iterator[_Call]:
    references = policy.record_references(episode.observations, task_of(episode.observations[0].prompt), episode.name)
    scale = half_ranges(policy, episode.observations[0])
    for observation, reference in zip(episode.observations, references):
        def error(actions: torch.Tensor, observation=observation, dense=reference.chunk) -> float:
            moved = np.abs(policy.processor.decode(actions, observation) - dense) / scale
            return float(moved[:executed].mean())

        yield _Call(number, policy.processor.encode(observation), reference, error)


def _match(policy: MusclePolicy, calls: Sequence[_Call], i: int, window: int) -> Match | None:
    """The best of the references that the call before would have had expanded."""
    settings = replace(policy.settings, window=window)
    retriever = Retriever(policy.library.index(), settings)
    call, before = calls[i].reference, _before(calls, i)
    task, views = call.id.task, call.views
    if before is None:
        wanted = retriever.candidates(None, task, views)
    elif policy.config.action_dim != policy.config.state_dim:
        wanted = retriever.candidates(retriever.nearest(before.key, before.states, task, views), task, views)
    else:
        last = before.chunk[min(policy.execute_steps, len(before.chunk)) - 1]
        wanted = retriever.ahead(before.key, before.states, policy.processor.normalize_state(last), task, views)
    return retriever.match(call.key, call.states, wanted[:settings.slots], task, views)


def _before(calls: Sequence[_Call], i: int) -> Reference | None:
    """The call before in the same episode."""
    return calls[i - 1].reference if i and calls[i - 1].episode == calls[i].episode else None


def _try_all(policy: MusclePolicy, call: _Call, before: Reference | None, references: Sequence[ReferenceId],
             action_cache: bool, grid: Grid, cost: Cost) -> tuple[np.ndarray, np.ndarray]:
    """Errors and plans [tokens, neurons] of one call served by references, the best one first, and the call before,
    which gives tokens as it does in the policy."""
    engine, reference = policy.engine, policy.library.load(references[0])
    embedded = engine.embed(call.inputs)  # for this call: a graph engine acts on the latest only
    others = [*([before] if before else []), *(policy.library.load(other) for other in references[1:])]
    donors = range(1, 1 + len(others[:policy.settings.token_references - 1]))
    for slot in donors:
        engine.expand(others[slot - 1], slot, None, CallPlan(), lambda: None)
    shape = len(grid.tokens), len(grid.neurons)
    errors, plans = np.zeros(shape), np.empty(shape, object)
    ranked = torch.from_numpy(reference.neurons.astype(np.int32))
    for n, neuron_ratio in enumerate(grid.neurons):
        if n and not action_cache:  # denoising runs dense whatever the ratio is
            errors[:, n], plans[:, n] = errors[:, 0], plans[:, 0]
            continue
        for t, token_ratio in enumerate(grid.tokens):
            plan = plan_of(policy, embedded, token_ratio, neuron_ratio if action_cache else 1.0)
            if t == 0:
                engine.expand(reference, 0, ranked, plan, lambda: None)
            actions, _ = cost.run(plan, lambda plan=plan: engine.act(embedded, plan, 0, donors))
            errors[t, n], plans[t, n] = call.error(actions), plan
    return errors, plans


def plan_of(policy: MusclePolicy, embedded: Embedded, token_ratio: float, neuron_ratio: float) -> CallPlan:
    """The plan of both ratios; a ratio of one is that cache switched off."""
    settings = replace(policy.settings, mode='full', profile='custom', token_ratio=token_ratio,
                       neuron_ratio=neuron_ratio)
    plan = plan_call(settings, policy.config, embedded.tokens, embedded.text)
    return replace(plan, neurons=None, residual='none') if neuron_ratio == 1.0 else plan
