# SPDX-License-Identifier: Apache-2.0
"""Other ways for the Action Cache to spend the neurons that a ratio allows."""

from __future__ import annotations

import numpy as np
import torch
from calls import Bench, Tally

from rmuscle_core.ffn import DenseFFN, NeuronFFN
from rmuscle_core.settings import Settings

RATIOS = (0.25, 0.35, 0.5, 0.75)
TILTS = [(step, layer) for step in (0.0, 0.4, 0.7) for layer in (0.0, 0.3, 0.6)]


def common_ranking(bench: Bench) -> torch.Tensor:
    """Neurons by how high they rank in the library's references on average: int32 [G, M, masked]."""
    masked, total = bench.engine.arena.shape.masked, bench.config.expert.mlp
    score = np.zeros((*bench.library[0].neurons.shape[:2], total))
    for reference in bench.library:
        np.add.at(score, (*np.indices(reference.neurons.shape)[:2], reference.neurons),
                  np.broadcast_to(np.arange(masked, 0, -1), reference.neurons.shape))
    return torch.from_numpy((-score).argsort(-1)[..., :masked].astype(np.int32))


@torch.inference_mode()
def measure(bench: Bench) -> list[list[str | float]]:
    """Rows of Tally: every way at every ratio, the prefill dense."""
    tally, common = Tally(), common_ranking(bench)
    total, steps, group = bench.config.expert.mlp, bench.config.steps, Settings().group_size
    ways = {f'step_tilt {step:g}, layer_tilt {layer:g}': ({'step_tilt': step, 'layer_tilt': layer}, None)
            for step, layer in TILTS}
    ways |= {'anchored, even': ({'step_tilt': 0.0, 'layer_tilt': 0.0, 'residual': 'anchored'}, None),
             'even, no residual (the paper)': ({'step_tilt': 0.0, 'layer_tilt': 0.0, 'residual': 'none'}, None),
             'even, one ranking for all references': ({'step_tilt': 0.0, 'layer_tilt': 0.0}, common)}
    for call in bench.calls():
        for name, (values, ranking) in ways.items():
            for ratio in RATIOS:
                plan = bench.plan(mode='action', neuron_ratio=ratio, **values)
                bench.expand(call.references[0], 0, plan, ranking)
                bench.engine.arena.point_to(0, ())
                ffn = NeuronFFN(bench.engine.arena, plan.neurons, group, plan.residual)
                share = plan.mean_neurons(total, steps, group) / total
                tally.add(f'{name}: {ratio:g}', bench.error(call, DenseFFN(), ffn), share)
    return tally.rows()
