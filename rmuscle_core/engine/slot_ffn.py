# SPDX-License-Identifier: Apache-2.0
"""The cached and the recording FFNs for captured graphs: everything a replay may vary is read from the device.

They compute what their namesakes in rmuscle_core.ffn do, through kernels and on packed weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from rmuscle_core.arena import ReferenceArena
from rmuscle_core.engine.packed_ffn import PackedGeGLU, PackedNeurons
from rmuscle_core.engine.spread import Counts
from rmuscle_kernels.merge import merge_rows
from rmuscle_kernels.select import select_tokens


class SlotContextFFN:
    """Context Cache for the references in ``arena.donors`` at replay; ``tokens`` visual rows are recomputed a layer."""

    def __init__(self, arena: ReferenceArena, tokens: int) -> None:
        self.arena, self.tokens = arena, tokens

    def __call__(self, x: torch.Tensor, mlp: PackedGeGLU, layer: int, step: int = 0) -> torch.Tensor:
        arena, rows = self.arena, x[0]
        total = arena.shape.tokens
        if self.tokens >= total:
            return mlp(x)
        index, inverse = select_tokens(arena.comparable(rows[:total]), arena.x[:, layer], arena.donors, self.tokens,
                                       rows.shape[0] - total)
        return merge_rows(None, mlp.rows(rows, index), inverse, arena.y[:, layer])[None]


class SlotNeuronFFN:
    """Action Cache for the reference in ``arena.slot`` at replay: ``neurons[group][layer]`` of its ranking, of
    ``total``.

    residual: as in NeuronFFN. One object serves one denoising, steps in order: 'anchored' carries what the first step
    of a group left for its others.

    Since it only chooses, PackedExpert asks for the choice and folds norm and residual add into its kernels; after each
    layer it lets ``anchor`` look at the activations.
    """

    def __init__(self, arena: ReferenceArena, neurons: Counts, total: int, group_size: int, residual: str) -> None:
        self.arena, self.neurons, self.total, self.group_size = arena, neurons, total, group_size
        self.residual = residual
        self.anchors = residual == 'anchored' and any(count < total for counts in neurons for count in counts)
        self._kept: torch.Tensor | None = None
        if self.anchors:
            shape = arena.shape
            # [step of the group, M, H, W]: what the others would have left out of step 0, then what each adds
            self._added = arena.y.new_empty(min(group_size, shape.steps), shape.action_layers, shape.suffix,
                                            shape.action_width)

    def __call__(self, x: torch.Tensor, mlp: PackedNeurons, layer: int, step: int = 0) -> torch.Tensor:
        y = mlp.chosen(x[0], *self.choice(layer, step))[None]
        self.anchor(mlp, layer, step)
        return y

    def choice(self, layer: int, step: int) -> tuple:
        """Neurons int32 [slots, masked], slot, how many, residual [slots, H, W] or None; all None for every neuron."""
        arena, (group, since) = self.arena, divmod(step, self.group_size)
        count = self.neurons[group][layer]
        if count >= self.total or (self.anchors and since == 0):
            return None, None, None, None
        if self.anchors:  # the same whatever the slot
            residual = self._added[since, layer].expand(arena.slots, -1, -1)
        else:
            residual = arena.residual[:, step, layer] if self.residual == 'reference' else None
        return arena.neurons[:, group, layer], arena.slot, count, residual

    def anchor(self, mlp: PackedNeurons, layer: int, step: int) -> None:
        """Called after each layer: where it was dense for a group's sake, keep what the other steps will leave out."""
        if not self.anchors or step % self.group_size:
            return
        stop = min(step + self.group_size, self.arena.shape.steps)
        if stop == step + 1:
            return  # no step follows in this group
        if layer == 0:  # one look at the masks for all layers
            ranked = self.arena.neurons[:, step // self.group_size]
            self._kept = ranked.index_select(0, self.arena.slot)[0].long()
        count = self.neurons[step // self.group_size][layer]
        if count < self.total:  # else no step of the group leaves anything out here
            mlp.left_out(self._kept[layer, :count], self._added[0, layer])
        if layer == self.arena.shape.action_layers - 1:
            self._foretell(step, stop)

    def _foretell(self, step: int, stop: int) -> None:
        """What the group's other steps add in every layer: R as the reference has it, plus how far this call is off."""
        stored, slot = self.arena.residual, self.arena.slot
        later = self._added[1:stop - step]
        torch.index_select(stored[:, step + 1:stop], 0, slot, out=later[None])
        later += self._added[0] - stored[:, step].index_select(0, slot)


class SlotRecordFFN:
    """Dense prefix FFN that keeps the visual rows' input and output in the slot that ``slot`` (int64 [1]) names.

    cut() is called before each layer: a captured graph may be divided there.
    """

    def __init__(self, arena: ReferenceArena, slot: torch.Tensor, cut: Callable[[], None]) -> None:
        self.arena, self.slot, self.cut = arena, slot, cut

    def __call__(self, x: torch.Tensor, mlp: PackedGeGLU, layer: int, step: int = 0) -> torch.Tensor:
        self.cut()
        y, tokens = mlp(x), self.arena.shape.tokens
        self.arena.x[:, layer].index_copy_(0, self.slot, self.arena.comparable(x[0, :tokens])[None])
        self.arena.y[:, layer].index_copy_(0, self.slot, y[:, :tokens])
        return y


class SlotResidualFFN:
    """Dense expert FFN that keeps, in the slot that ``slot`` names, what all but its first ``neurons[group][layer]``
    contribute."""

    def __init__(self, arena: ReferenceArena, slot: torch.Tensor, neurons: Counts, group_size: int,
                 cut: Callable[[], None]) -> None:
        self.arena, self.slot, self.neurons, self.group_size, self.cut = arena, slot, neurons, group_size, cut

    def __call__(self, x: torch.Tensor, mlp: PackedNeurons, layer: int, step: int = 0) -> torch.Tensor:
        if layer == 0:
            self.cut()
        group = step // self.group_size
        count = self.neurons[group][layer]
        if count >= mlp.gate.out_features:  # a call evaluates them all
            return mlp.down(mlp.activations(x))
        a = mlp.activations(x)
        ranked = self.arena.neurons[:, group, layer, :count]
        kept = ranked.index_select(0, self.slot)[0].long()
        dropped = a.index_fill(-1, kept, 0)
        self.arena.residual[:, step, layer].index_copy_(0, self.slot, mlp.down(dropped))
        return mlp.down(a)
