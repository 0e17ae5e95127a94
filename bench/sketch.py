# SPDX-License-Identifier: Apache-2.0
"""How often a sketch of the FFN inputs chooses the same tokens as the inputs themselves.

    python bench/sketch.py                                      # pi0.5's widths, few layers, random weights
    python bench/sketch.py --checkpoint DIR --recording FILE    # a policy on calls of different episodes

agreement: share of the chosen tokens that full comparison chooses too. change kept: change of the tokens chosen by
sketch over that of the tokens chosen in full; this is what matters, since tokens near the threshold are much alike.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from rmuscle_core.arena import sketch_projection
from rmuscle_core.bench.calls import perturbed, random_inputs
from rmuscle_core.bench.report import print_table
from rmuscle_core.bench.sizes import PI05, TEXT, random_model
from rmuscle_core.engine.plan import token_count
from rmuscle_core.library import LibraryIndex, ReferenceId
from rmuscle_core.library.recording import open_recording
from rmuscle_core.model import VLA, load_model
from rmuscle_core.processing import ModelInputs, Processor
from rmuscle_core.retrieval import Retriever, make_key
from rmuscle_core.settings import PROFILES, Settings
from rmuscle_kernels.select import select_tokens_reference

WIDTHS = (32, 64, 128, 256)
SHALLOW = replace(PI05, dtype='float32', vision=replace(PI05.vision, layers=4), prefix=replace(PI05.prefix, layers=4),
                  expert=replace(PI05.expert, layers=4), vocab=1024)
ZERO = torch.zeros(1, dtype=torch.int32)


def ffn_inputs(model: VLA, inputs: ModelInputs) -> list[torch.Tensor]:
    """Visual rows [T, D] that enter each live prefix FFN."""
    seen = []

    def keep(x: torch.Tensor, mlp, layer: int, step: int = 0) -> torch.Tensor:
        seen.append(x[0, :tokens].clone())
        return mlp(x)

    visual = model.embed_images(inputs.images).flatten(0, 1)
    tokens = visual.shape[0]
    model.prefill(torch.cat([visual, model.embed_prompt(inputs.token_ids)])[None], keep)
    return seen


def compare(x: torch.Tensor, reference: torch.Tensor, k: int, width: int) -> tuple[float, float]:
    """Agreement and change kept for one layer; x, reference [T, D]."""
    projection = sketch_projection(x.shape[1], width)
    full, _ = select_tokens_reference(x, reference[None], ZERO, k, 0)
    sketched, _ = select_tokens_reference(x @ projection, (reference @ projection)[None], ZERO, k, 0)
    change = (x - reference).square().sum(-1) / reference.square().sum(-1)
    shared = torch.isin(sketched, full).float().mean()
    return float(shared), float(change[sketched.long()].sum() / change[full.long()].sum())


Pairs = Iterator[tuple[ModelInputs, ModelInputs]]  # an observation and the one its reference was made of


def random_pairs() -> tuple[VLA, Pairs]:
    """A model of pi0.5's widths and one slightly changed scene."""
    model = random_model(SHALLOW, torch.device('cpu'))
    scene = random_inputs(SHALLOW, TEXT['pi05'])
    return model, iter([(scene, perturbed(scene))])


def recorded_pairs(checkpoint: Path, recording: Path, most: int) -> tuple[VLA, Pairs]:
    """Calls spread over a recording, each with the most similar call of another episode, as retrieval finds it."""
    model = load_model(checkpoint, dtype='float32')
    processor = Processor.from_checkpoint(checkpoint, model.config)
    calls, ids, keys, states = [], [], [], []
    with open_recording(recording) as episodes, torch.inference_mode():
        for episode in episodes:
            for number, observation in enumerate(episode.observations):
                calls.append(processor.encode(observation))
                ids.append(ReferenceId('recording', episode.name, number))
                keys.append(make_key(model.embed_images(calls[-1].images).flatten(0, 1), calls[-1].views))
                states.append(calls[-1].state_normalized[None])
    index = LibraryIndex(tuple(ids), tuple(c.views for c in calls), np.stack(keys), np.stack(states))
    retriever = Retriever(index, Settings(min_similarity=0.0))

    def pairs() -> Pairs:
        for row in range(0, len(calls), max(1, len(calls) // most)):
            others = [identity for identity in ids if identity.episode != ids[row].episode]
            match = retriever.match(keys[row], states[row], others, 'recording', calls[row].views)
            yield calls[row], calls[ids.index(match.id)]

    return model, pairs()


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--checkpoint', type=Path)
    parser.add_argument('--recording', type=Path)
    parser.add_argument('--calls', type=int, default=24, help='pairs of recorded calls (%(default)s)')
    args = parser.parse_args()
    model, pairs = (recorded_pairs(args.checkpoint, args.recording, args.calls) if args.checkpoint
                    else random_pairs())
    found: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for now, then in pairs:
        for x, reference in zip(ffn_inputs(model, now), ffn_inputs(model, then)):
            for width in (w for w in WIDTHS if w < x.shape[1]):
                for profile, (ratio, _) in PROFILES.items():
                    k = token_count(ratio, x.shape[0])
                    found.setdefault((width, profile), []).append(compare(x, reference, k, width))
    rows = [[width, profile, *torch.tensor(values).mean(0).tolist(), torch.tensor(values)[:, 0].min().item()]
            for (width, profile), values in found.items()]
    print_table(f'{len(next(iter(found.values())))} layers compared', ['width', 'profile', 'agreement', 'change kept',
                                                                       'least agreement'], rows)
    print(json.dumps([dict(zip(('width', 'profile', 'agreement', 'change_kept', 'least'), row)) for row in rows]))


if __name__ == '__main__':
    main()
