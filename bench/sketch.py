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

import torch

from rmuscle_core.arena import sketch_projection
from rmuscle_core.bench.calls import perturbed, random_inputs
from rmuscle_core.bench.report import print_table
from rmuscle_core.bench.sizes import PI05, TEXT, random_model
from rmuscle_core.engine.plan import token_count
from rmuscle_core.library.recording import open_recording
from rmuscle_core.model import VLA, load_model
from rmuscle_core.processing import ModelInputs, Processor
from rmuscle_core.settings import PROFILES
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
    """Call by call, each episode against the one before it."""
    model = load_model(checkpoint, dtype='float32')
    processor = Processor.from_checkpoint(checkpoint, model.config)

    def pairs() -> Pairs:
        count, before = 0, None
        with open_recording(recording) as episodes:
            for episode in episodes:
                inputs = [processor.encode(observation) for observation in episode.observations]
                for now, then in zip(inputs, before or ()):
                    if count < most:
                        count += 1
                        yield now, then
                before = inputs

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
