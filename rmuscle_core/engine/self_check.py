# SPDX-License-Identifier: Apache-2.0
"""Does an engine compute what the model says? Asked at start-up, on the GPU and with the kernels that will be used.

A compiler that does not know the GPU, or compiles a kernel wrongly, then costs speed instead of a robot's motion.
"""

from __future__ import annotations

import numpy as np
import torch

from rmuscle_core.engine.eager import EagerEngine
from rmuscle_core.engine.graphs import GraphEngine
from rmuscle_core.engine.lane import go_on
from rmuscle_core.engine.plan import CallPlan, plan_call
from rmuscle_core.ffn import DenseFFN
from rmuscle_core.library import Reference, ReferenceId
from rmuscle_core.model import VLA
from rmuscle_core.processing import ModelInputs

LIMIT = 0.05  # of the way from noise to action; what bfloat16 rounds away is far below
TEXT = 32


@torch.inference_mode()
def disagreement(engine: EagerEngine | GraphEngine, model: VLA) -> str:
    """What differs from the plain model by more than LIMIT, as one sentence; empty when nothing does.

    Compared are a dense call and a call that reuses as much as the settings allow from a reference made of the same
    observation, which must give the dense result again. Leaves the arena's first slot overwritten.
    """
    inputs = _inputs(model, engine.arena.shape.tokens // model.config.vision.tokens)
    images, ids = (x.to(engine.device) for x in (inputs.images, inputs.token_ids))
    visual = model.embed_images(images).flatten(0, 1)
    prefix = torch.cat([visual, model.embed_prompt(ids).to(visual.dtype)])[None]
    expected = model.denoise(model.prefill(prefix, DenseFFN()), engine.noise, DenseFFN())[0].float().cpu()

    dense, _ = engine.act(engine.embed(inputs), CallPlan(), None)
    compared = [('dense', dense, LIMIT)]
    if engine.arena.slots:
        reference = _reference(model, inputs, visual)
        embedded = engine.embed(inputs)
        plan = plan_call(engine.settings.with_values(mode='full'), model.config, embedded.tokens, embedded.text)
        engine.expand(reference, 0, engine.rank_neurons(reference, go_on), plan, go_on)
        cached, _ = engine.act(engine.embed(inputs), plan, 0)
        # Without R of each step the dropped neurons are missing or outdated by design: the call has to be finite.
        compared.append(('cached', cached, LIMIT if plan.stored_residual else 1e3))
    for name, found, limit in compared:
        error = float((found - expected).norm() / (expected - engine.noise[0].float().cpu()).norm())
        if not error <= limit:  # also when it is not a number
            return (f'a {name} call of the fast engine leaves the plain model by {error:.3g} of the way from noise to '
                    f'action, more than {limit:g}; calls run on the plain engine, slower. Check the versions of torch, '
                    'triton and the driver')
    return ''


def _inputs(model: VLA, views: int) -> ModelInputs:
    config, generator = model.config, torch.Generator().manual_seed(0)
    side = config.vision.image_size
    images = torch.rand(views, 3, side, side, generator=generator) * 2 - 1
    ids = torch.randint(3, config.vocab, (min(TEXT, config.prompt_length),), generator=generator)
    return ModelInputs(images, config.cameras[:views], ids, torch.zeros(config.padded_dim),
                       np.zeros(config.state_dim, np.float32))


def _reference(model: VLA, inputs: ModelInputs, visual: torch.Tensor) -> Reference:
    config = model.config
    return Reference(ReferenceId('self-check', 'episode', 0), visual.to('cpu', torch.bfloat16),
                     inputs.token_ids.numpy().astype(np.int32), inputs.state_normalized[None],
                     np.zeros((len(inputs.views), 1), np.float32), None,
                     np.zeros((config.chunk_size, config.action_dim), np.float32), inputs.views)
