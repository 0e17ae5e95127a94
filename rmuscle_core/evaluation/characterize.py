# SPDX-License-Identifier: Apache-2.0
"""How much repeated executions have in common inside the model: what the paper's third section measures.

Each call of the later episodes of a recording is compared with the most similar call of the earlier ones (the matched
reference) and, as a yardstick, with the call of the same number in another of the earlier episodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.nn import functional as F

from rmuscle_core.engine.eager import EagerEngine
from rmuscle_core.errors import EpisodeError
from rmuscle_core.library import Reference
from rmuscle_core.library.recording import RecordedEpisode
from rmuscle_core.policy import MusclePolicy, task_of

SHARES = (0.1, 0.2, 0.3, 0.5)  # of tokens or neurons
SHARED_STEPS = (1, 2, 5, 10)
PATHS = ('left', 'right')  # joints whose names begin so form an arm of their own

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class CallStates:
    """What one dense call computes: FFN inputs x and outputs y [L,T,D] of the visual tokens, what each expert neuron
    contributes [K,M,N] (norm of its down projection times the summed size of its activation), normalised actions
    [H,A]."""

    x: torch.Tensor
    y: torch.Tensor
    contribution: torch.Tensor
    actions: torch.Tensor


def compute(engine: EagerEngine, reference: Reference) -> CallStates:
    """Run the call densely again, keeping its states on the host in float32."""
    config = engine.model.config
    x, y, contributions = [], [], torch.zeros(config.steps, config.expert.layers, config.expert.mlp)

    def prefix_ffn(rows: torch.Tensor, mlp, layer: int, step: int = 0) -> torch.Tensor:
        out, tokens = mlp(rows), reference.prefix.shape[0]
        x.append(rows[0, :tokens].float().cpu())
        y.append(out[0, :tokens].float().cpu())
        return out

    def expert_ffn(rows: torch.Tensor, mlp, layer: int, step: int = 0) -> torch.Tensor:
        a = mlp.activations(rows)
        contributions[step, layer] = (a[0].float().abs().sum(0) * mlp.down.weight.float().norm(dim=0)).cpu()
        return mlp.down(a)

    actions = engine.rerun(reference, prefix_ffn, expert_ffn)[0, :, :config.action_dim]
    return CallStates(torch.stack(x), torch.stack(y), contributions, actions.float().cpu())


def characterise(policy: MusclePolicy, episodes: Sequence[RecordedEpisode], joints: Sequence[str], references: int,
                 most_calls: int = 0, progress: Progress = lambda done, total: None) -> dict:
    """Measure; plain numbers fit for JSON. references: how many episodes come first and serve as such.

    Raises EpisodeError when there are fewer than two references or no episode is left to compare with them.
    """
    if not 1 < references < len(episodes):
        raise EpisodeError(f'{len(episodes)} usable episodes cannot be split into {references} references and the '
                           'rest; two references are needed at least, the matched one and a yardstick, and an episode '
                           'to compare with them: record more, or set --references')
    recorded = [policy.record_references(e.observations, task_of(e.observations[0].prompt), e.name) for e in episodes]
    known = [(number, reference) for number in range(references) for reference in recorded[number]]
    calls = [(number, call) for number, episode in enumerate(recorded[references:])
             for call in range(len(episode))][:most_calls or None]
    engine = EagerEngine(policy.model, replace(policy.settings, slots=1), len(policy.cameras))
    pairs, others, matched = [], [], {}
    for done, (number, call) in enumerate(calls):
        current = recorded[references + number][call]
        owner, best = max(known, key=lambda one: policy.memory.retriever.compare(current.key, current.states, one[1])
                          .similarity)
        matched.setdefault(number, Counter())[owner] += 1
        states = compute(engine, current)
        pairs.append(compare(states, compute(engine, best)))
        other = yardstick(recorded[:references], owner, number)
        others.append(compare(states, compute(engine, other[min(call, len(other) - 1)])))
        progress(done + 1, len(calls))
    paths = [path_cosines(_path(episodes[references + number]), _path(episodes[owners.most_common(1)[0][0]]), joints)
             for number, owners in matched.items()]
    return {'calls': len(calls), 'reference_episodes': references, 'shares': SHARES, 'shared_steps': SHARED_STEPS,
            'path_cosine': {arm: round(float(np.mean([path[arm] for path in paths])), 4) for arm in paths[0]},
            'matched': _mean(pairs), 'same_number': _mean(others)}


def yardstick(references: Sequence[list[Reference]], matched: int, number: int) -> list[Reference]:
    """One of the episodes that did not match, by turns with the number of the current one."""
    others = [episode for owner, episode in enumerate(references) if owner != matched]
    return others[number % len(others)]


def compare(current: CallStates, reference: CallStates) -> dict[str, np.ndarray]:
    """Measures of one pair of calls; arrays [L], [shares] or []."""
    dx, dy = (current.x - reference.x).norm(dim=-1), (current.y - reference.y).norm(dim=-1)  # [L,T]
    own, theirs = current.contribution, reference.contribution
    masks = [own.argsort(dim=-1, descending=True), theirs.argsort(dim=-1, descending=True)]
    found = {
        'ffn_input_cosine': F.cosine_similarity(current.x, reference.x, dim=-1).mean(1).numpy(),
        'ffn_output_cosine': F.cosine_similarity(current.y, reference.y, dim=-1).mean(1).numpy(),
        'action_cosine': float(F.cosine_similarity(current.actions.flatten(), reference.actions.flatten(), dim=0)),
        'output_change_covered': np.array([_covered(dy, dx.argsort(dim=-1, descending=True), s) for s in SHARES]),
        'contribution_covered': np.array([_covered(own, masks[0], s) for s in SHARES]),
        'covered_by_reference': np.array([_covered(own, masks[1], s) for s in SHARES]),
        'mask_overlap': np.array([_overlap(*masks, s) for s in SHARES]),
        'consecutive_steps_overlap': np.array([_overlap(masks[0][1:], masks[0][:-1], s) for s in SHARES]),
        'first_last_step_overlap': np.array([_overlap(masks[0][:1], masks[0][-1:], s) for s in SHARES]),
        'covered_at_half_by_shared_mask': np.array([_covered(own, _shared_mask(theirs, n), 0.5) for n in SHARED_STEPS])}
    return {name: np.asarray(value) for name, value in found.items()}


def _covered(amount: torch.Tensor, order: torch.Tensor, share: float) -> float:
    """Share of ``amount`` [..., n] that falls to the first of ``order`` [..., n], mean over the leading axes."""
    count = max(1, round(share * amount.shape[-1]))
    return float((amount.gather(-1, order[..., :count]).sum(-1) / amount.sum(-1).clamp_min(1e-12)).mean())


def _overlap(first: torch.Tensor, second: torch.Tensor, share: float) -> float:
    count = max(1, round(share * first.shape[-1]))
    members = [torch.zeros(*order.shape[:-1], order.shape[-1], dtype=torch.bool).scatter(-1, order[..., :count], True)
               for order in (first, second)]
    return float((members[0] & members[1]).sum(-1).float().mean() / count)


def _shared_mask(contribution: torch.Tensor, steps: int) -> torch.Tensor:
    """Ranking [K,M,N] when ``steps`` consecutive steps share one."""
    summed = [part.sum(0, keepdim=True).expand_as(part) for part in contribution.split(steps)]
    return torch.cat(summed).argsort(dim=-1, descending=True)


def _path(episode: RecordedEpisode) -> np.ndarray:
    return np.stack([observation.state for observation in episode.observations])


def path_cosines(first: np.ndarray, second: np.ndarray, joints: Sequence[str]) -> dict[str, float]:
    """Cosine of two joint paths [calls, S], in the checkpoint's units, over their common calls, per arm where joint
    names tell arms apart."""
    common = min(len(first), len(second))
    arms = {arm: [i for i, name in enumerate(joints) if name.startswith(arm)] for arm in PATHS}
    if not all(arms.values()):
        arms = {'arm': list(range(first.shape[1]))}
    cosines = {}
    for arm, columns in arms.items():
        a, b = first[:common, columns].ravel(), second[:common, columns].ravel()
        cosines[arm] = float(a @ b / max(np.linalg.norm(a) * np.linalg.norm(b), 1e-12))
    return cosines


def _mean(measures: Sequence[dict[str, np.ndarray]]) -> dict[str, list | float]:
    return {name: np.mean([m[name] for m in measures], axis=0, dtype=float).round(4).tolist() for name in measures[0]}
