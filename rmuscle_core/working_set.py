# SPDX-License-Identifier: Apache-2.0
"""Which reference is expanded in which slot of the arena, and who may touch it.

The lock covers bookkeeping only; no model work and no I/O happens under it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rmuscle_core.engine.spread import Counts
from rmuscle_core.library import ReferenceId


@dataclass
class _Slot:
    reference: ReferenceId | None = None
    ready: bool = False
    readers: int = 0
    residual_neurons: Counts | int | None = None  # as in Reading


@dataclass(frozen=True)
class Reading:
    """Pinned slots. residual_neurons: what the first has for the Action Cache: the neuron counts its residual was built
    for, 0 for a ranking without residual, None for nothing. donors: other slots that tokens may reuse outputs of."""

    slot: int
    residual_neurons: Counts | int | None
    donors: tuple[int, ...] = ()


class WorkingSet:
    """Slots and their references. Inference reads (``reading``), the reconstructor writes (``claim``/``commit``)."""

    def __init__(self, slots: int) -> None:
        self._lock = threading.Lock()
        self._slots = [_Slot() for _ in range(slots)]

    def __len__(self) -> int:
        return len(self._slots)

    def ready(self) -> list[ReferenceId]:
        """References that can serve a call now."""
        with self._lock:
            return [s.reference for s in self._slots if s.ready]

    def has(self, reference: ReferenceId, residual_neurons: Counts | int | None) -> bool:
        """Whether the reference is ready with what is asked for the Action Cache (as in Reading; less is in more)."""
        with self._lock:
            found = next((s.residual_neurons for s in self._slots if s.ready and s.reference == reference), ())
        if found == () or residual_neurons is None:
            return found != ()
        return found is not None if residual_neurons == 0 else found == residual_neurons

    @contextmanager
    def reading(self, reference: ReferenceId | None, others: Sequence[ReferenceId] = ()) -> Iterator[Reading | None]:
        """Pin the slots of a reference, and of others if they are ready, for one call; yields None if the reference is
        not (or no longer) ready."""
        with self._lock:
            ready = {s.reference: (i, s) for i, s in enumerate(self._slots) if s.ready}
            wanted = (reference, *others) if reference in ready else ()
            pinned = [ready[wish] for wish in wanted if wish in ready]
            for _, slot in pinned:
                slot.readers += 1
        try:
            first, *donors = [index for index, _ in pinned] or [None]
            yield None if first is None else Reading(first, pinned[0][1].residual_neurons, tuple(donors))
        finally:
            with self._lock:
                for _, slot in pinned:
                    slot.readers -= 1

    def claim(self, reference: ReferenceId, wanted: Sequence[ReferenceId]) -> int | None:
        """Return a slot to expand the reference into, not readable until ``commit``; None if all are better used.

        Order: the slot that holds it already (outdated residual), an empty one, one whose reference is not
        wanted, the one wanted least (wanted is ordered by likelihood) if that is after the reference itself.
        """
        rank = {r: i for i, r in enumerate(wanted)}

        def preference(item: tuple[int, _Slot]) -> tuple[int, int]:
            index, slot = item
            if slot.reference == reference:
                return (0, index)
            if slot.reference is None:
                return (1, index)
            return (2, -rank.get(slot.reference, len(rank)))

        with self._lock:
            free = [item for item in enumerate(self._slots) if not item[1].readers]
            if not free:
                return None
            index, slot = min(free, key=preference)
            outranked = slot.reference not in (None, reference) and (
                rank.get(slot.reference, len(rank)) < rank.get(reference, len(rank)))
            if outranked:
                return None
            self._slots[index] = _Slot(reference=reference)
            return index

    def commit(self, slot: int, residual_neurons: Counts | int | None) -> None:
        """The slot is complete and may be read."""
        with self._lock:
            self._slots[slot].residual_neurons = residual_neurons
            self._slots[slot].ready = True

    def abandon(self, slot: int) -> None:
        """The expansion into the slot was not finished."""
        with self._lock:
            self._slots[slot] = _Slot()

    def drop(self, reference: ReferenceId) -> None:
        """Forget a reference that turned out to be unusable or belongs to an ended episode."""
        with self._lock:
            for i, slot in enumerate(self._slots):
                if slot.reference == reference and slot.ready and not slot.readers:
                    self._slots[i] = _Slot()
