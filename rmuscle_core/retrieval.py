# SPDX-License-Identifier: Apache-2.0
"""Which reference fits the present call, and which ones the next call is likely to need."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from rmuscle_core.library.fitting import KEY_WIDTH
from rmuscle_core.library.index import LibraryIndex
from rmuscle_core.library.reference import Reference, ReferenceId
from rmuscle_core.settings import Settings

_GRID = 4


@dataclass(frozen=True)
class Match:
    """The reference most similar to the present call.

    similarity: weighted mean of ``visual`` and ``state``, each at most 1.
    rivals: of every episode that was compared, its most similar call; most similar episode first.
    """

    id: ReferenceId
    similarity: float
    visual: float
    state: float
    rivals: tuple[ReferenceId, ...] = ()


def make_key(prefix_visual: torch.Tensor, views: tuple[str, ...]) -> np.ndarray:
    """Retrieval key float32 [V,C], C = min(D, 256), from the visual embeddings [T,D] of V views.

    The tokens of a view are averaged over a 4 x 4 grid (over the whole view when its side is not a multiple of 4), so
    that the key knows where something is and not only that it is there. The cells' vectors are brought to C numbers by
    one fixed random projection with signs that differ per cell, which keeps inner products as a projection of the
    joined cells would, at a 16th of its memory.
    """
    views_count, width = len(views), prefix_visual.shape[-1]
    tokens = prefix_visual.float().reshape(views_count, -1, width)
    side = int(tokens.shape[1] ** 0.5)
    if side * side == tokens.shape[1] and side % _GRID == 0:
        step = side // _GRID
        cells = tokens.reshape(views_count, _GRID, step, _GRID, step, width).mean((2, 4)).flatten(1, 2)
    else:
        cells = tokens.mean(1, keepdim=True)
    projection, signs = _projection(width, str(prefix_visual.device))
    return ((cells @ projection) * signs[:cells.shape[1]]).sum(1).cpu().numpy()


@lru_cache(maxsize=4)
def _projection(width: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Seeded numbers, equal in every process since keys are stored: [D,C] and +-1 [cells,C]."""
    bits = np.random.PCG64(0)  # numpy guarantees this stream over versions, which it does not for distributions
    size = min(width, KEY_WIDTH)
    uniform = (bits.random_raw((width + _GRID**2) * size) >> 40).astype(np.float32) / 2**23 - 1
    projection, signs = np.split(uniform.reshape(-1, size), [width])
    return torch.from_numpy(projection).to(device), torch.from_numpy(np.sign(signs + 2**-25)).to(device)


class Retriever:
    """Compares a call with the index of a library. Used by one thread; `use` and ``settings`` may be set from any.

    Only references of the same task and the same views are eligible: others have other tokens in the same places.
    Similarities do not depend on units: keys enter by cosine, states as normalised by the checkpoint's statistics.
    """

    def __init__(self, index: LibraryIndex | None, settings: Settings) -> None:
        self.settings = settings
        self._groups: dict[tuple[str, tuple[str, ...]], _Group] = {}
        if index is not None:
            self.use(index)

    def use(self, index: LibraryIndex) -> None:
        """Take a new index, for example after an episode was added."""
        rows: dict[tuple[str, tuple[str, ...]], list[int]] = {}
        for row, (identity, views) in enumerate(zip(index.ids, index.views, strict=True)):
            rows.setdefault((identity.task, views), []).append(row)
        self._groups = {group: _Group(index, members, len(group[1])) for group, members in rows.items()}

    def match(self, key: np.ndarray, states: np.ndarray, ready: Iterable[ReferenceId], task: str,
              views: tuple[str, ...]) -> Match | None:
        """Best of the ``ready`` references, None below ``min_similarity``; key [V,C], states [h,S] newest last."""
        found = self._best(key, states, task, views, set(ready))
        return found if found and found.similarity >= self.settings.min_similarity else None

    def nearest(self, key: np.ndarray, states: np.ndarray, task: str, views: tuple[str, ...]) -> Match | None:
        """Best of the whole index, ready or not, however dissimilar."""
        return self._best(key, states, task, views, None)

    def compare(self, key: np.ndarray, states: np.ndarray, reference: Reference) -> Match:
        """Similarity to one reference that need not be in the index; its views must be those of the call."""
        index = LibraryIndex((reference.id,), (reference.views,), reference.key[None], reference.states[None])
        group = _Group(index, [0], len(reference.views))
        return self._match(reference.id, group.visual(key)[0], group.state(states)[0])

    def candidates(self, match: Match | None, task: str, views: tuple[str, ...]) -> list[ReferenceId]:
        """References the next call is likely to need, best first.

        After a match: in each of the best ``window_episodes`` episodes the call after its most similar one, then the
        neighbours of that, up to ``window`` away. Without a match: the first call of each episode of the task.
        """
        group = self._groups.get((task, views))
        if group is None:
            return []
        if match is None:
            return [identity for identity in group.ids if identity.call == 0]
        centres = match.rivals[:self.settings.window_episodes]
        offsets = sorted(range(-self.settings.window, self.settings.window + 1), key=lambda o: (abs(o), -o))
        wanted = [centre._replace(call=centre.call + 1 + offset) for offset in offsets for centre in centres]
        return [identity for identity in wanted if identity in group.row]

    def ahead(self, key: np.ndarray, states: np.ndarray, expected: np.ndarray, task: str,
              views: tuple[str, ...]) -> list[ReferenceId]:
        """References the next call is likely to need when its state [S] can be foretold, best first.

        Each episode offers the call that such a state fits best and whose predecessor looked as it looks now: episodes
        that are alike now part ways where the object lies elsewhere, and the chunk under way knows where it goes. As
        many episodes as `candidates` would give references.
        """
        group = self._groups.get((task, views))
        if group is None:
            return []
        visual = group.visual(key)
        state = group.state(np.concatenate([states, expected[None]])[-self.settings.history:])
        weight = self.settings.visual_weight
        score = weight * visual[group.before] + (1 - weight) * state
        best: dict[str, ReferenceId] = {}
        for row in np.argsort(-score, kind='stable'):
            if len(best) == self.settings.window_episodes * (2 * self.settings.window + 1):
                break
            if group.before[row] >= 0:
                best.setdefault(group.ids[row].episode, group.ids[row])
        return list(best.values())

    def _best(self, key: np.ndarray, states: np.ndarray, task: str, views: tuple[str, ...],
              among: set[ReferenceId] | None) -> Match | None:
        group = self._groups.get((task, views))
        if group is None:
            return None
        rows = None if among is None else sorted(group.row[identity] for identity in among if identity in group.row)
        if rows == []:
            return None
        visual, state = group.visual(key, rows), group.state(states, rows)
        order = np.argsort(-(self.settings.visual_weight * visual + (1 - self.settings.visual_weight) * state),
                           kind='stable')
        ids = group.ids if rows is None else [group.ids[row] for row in rows]
        rivals: dict[str, ReferenceId] = {}
        for row in order:
            rivals.setdefault(ids[row].episode, ids[row])
        best = order[0]
        return self._match(ids[best], visual[best], state[best], tuple(rivals.values()))

    def _match(self, identity: ReferenceId, visual: float, state: float,
               rivals: tuple[ReferenceId, ...] = ()) -> Match:
        weight = self.settings.visual_weight
        return Match(identity, float(weight * visual + (1 - weight) * state), float(visual), float(state), rivals)


class _Group:
    """References that may stand in for each other, in the form that makes a comparison two products."""

    def __init__(self, index: LibraryIndex, rows: list[int], views: int) -> None:
        self.ids = [index.ids[row] for row in rows]
        self.row = {identity: i for i, identity in enumerate(self.ids)}
        # row of the call before, -1 for an episode's first
        self.before = np.array([self.row.get(i._replace(call=i.call - 1), -1) for i in self.ids])
        self._keys = _unit(index.keys[rows, :views]).reshape(len(rows), -1) / views
        states = index.states[rows]
        self._known = np.isfinite(states[..., 0])  # [E,h]
        self._states = np.nan_to_num(states)

    def visual(self, key: np.ndarray, rows: list[int] | None = None) -> np.ndarray:
        """The cosine averaged over views, of each reference [E] or of those in ``rows``."""
        keys = self._keys if rows is None else self._keys[rows]
        return keys @ _unit(key).reshape(-1)

    def state(self, states: np.ndarray, rows: list[int] | None = None) -> np.ndarray:
        """exp(-rms difference) of the state histories over their common newest part, likewise."""
        steps = min(len(states), self._states.shape[1])
        stored, known = (x[:, -steps:] if rows is None else x[rows, -steps:] for x in (self._states, self._known))
        # in double precision, so that a joint far out of its range is far away and not an overflow
        difference = ((stored - states[-steps:].astype(np.float64)) ** 2).mean(-1)
        return np.exp(-np.sqrt((difference * known).sum(1) / known.sum(1)))


def _unit(keys: np.ndarray) -> np.ndarray:
    return keys / np.maximum(np.linalg.norm(keys, axis=-1, keepdims=True), 1e-12)
