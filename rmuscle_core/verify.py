# SPDX-License-Identifier: Apache-2.0
"""``rmuscle verify``: does this implementation compute what the one that trained the checkpoint computes?

The reference is an .npz of one batch run through LeRobot, stage by stage. The stored images, token ids and noise are
fed, so that a difference is the network's and not the preprocessing's. Arrays (C cameras, R padded prefix rows):

    images_preprocessed [C,B,3,S,S]   image_masks [C,B]   token_ids, token_mask [B,P]   noise [B,H,A_pad]
    prefix_embs [B,R,D]   prefix_pad [B,R]   prefix_k, prefix_v [L,B,1,R,head_dim]
    prefix_ffn_in, prefix_ffn_out [L,B,R,D]
    velocities [K,B,H,A_pad]   actions_full [B,H,A_pad]   state_padded [B,S_pad] (pi0 only)
"""

from __future__ import annotations

import argparse
import json
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from rmuscle_core.errors import CheckpointError
from rmuscle_core.model import VLA, load_model
from rmuscle_core.model.config import NUMERICS

ARRAYS = ('images_preprocessed', 'image_masks', 'token_ids', 'token_mask', 'noise', 'prefix_embs', 'prefix_pad',
          'prefix_k', 'prefix_v', 'prefix_ffn_in', 'prefix_ffn_out', 'velocities', 'actions_full')
# Largest absolute difference allowed. In bfloat16 one unit in the last place of a value in [4, 8) is 3.1e-2, and
# kernels may round differently; what counts, the actions, averages that out.
HIDDEN = ('prefix keys', 'prefix values', 'FFN inputs', 'FFN outputs', 'velocities')
TOLERANCES = {'float32': dict.fromkeys(('embeddings', *HIDDEN, 'actions'), 1e-4),
              'bfloat16': {'embeddings': 2e-2, **dict.fromkeys(HIDDEN, 5e-2), 'actions': 2e-2},
              'fast': {**dict.fromkeys(('embeddings', *HIDDEN), 1e-1), 'actions': 2e-2}}


@dataclass
class Stage:
    """One compared stage, in the order of computation; error is the largest absolute difference."""

    name: str
    tolerance: float
    error: float = 0.0

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance  # False for NaN


def compare(model: VLA, reference: Mapping[str, np.ndarray]) -> list[Stage]:
    """Run every item of the reference batch alone, as a policy call would, and compare it stage by stage."""
    config = model.config
    exact = config.dtype == 'float32' or config.numerics == 'lerobot'
    stages = {name: Stage(name, limit) for name, limit in TOLERANCES[config.dtype if exact else 'fast'].items()}
    _check_fits(model, reference)

    def note(name: str, ours: torch.Tensor, theirs: np.ndarray) -> None:
        difference = (ours.float().cpu() - torch.from_numpy(theirs).float()).abs().max()
        stages[name].error = float(torch.maximum(difference, torch.tensor(stages[name].error)))  # keeps a NaN

    for item in range(len(reference['noise'])):
        _compare_item(model, reference, item, note)
    return list(stages.values())


def _check_fits(model: VLA, reference: Mapping[str, np.ndarray]) -> None:
    config = model.config
    size, sizes = config.vision.image_size, config.prefix
    for name, axes in (('images_preprocessed', (3, size, size)), ('noise', (config.chunk_size, config.padded_dim)),
                       ('prefix_ffn_in', (sizes.width,)), ('prefix_k', (sizes.head_dim,))):
        if reference[name].shape[-len(axes):] != axes:
            raise CheckpointError(f'the reference has {name} {reference[name].shape}, but this model makes '
                                  f'[..., {", ".join(map(str, axes))}]; record it with the same checkpoint')
    layers, steps = len(reference['prefix_k']), len(reference['velocities'])
    if (layers, steps) != (sizes.layers, config.steps) or ('state_padded' in reference) != (config.kind == 'pi0'):
        token = 'a' if 'state_padded' in reference else 'no'
        raise CheckpointError(f'the reference has {layers} prefix layers, {steps} steps and {token} state token, but '
                              f'the model is {config.kind} with {sizes.layers} layers and {config.steps} steps; record '
                              'it with the same checkpoint')


@torch.inference_mode()
def _compare_item(model: VLA, reference: Mapping[str, np.ndarray], item: int, note) -> None:
    def given(name: str) -> torch.Tensor:
        return torch.from_numpy(reference[name]).to(model.prefix_weight.device)

    present = reference['image_masks'][:, item]
    images = given('images_preprocessed')[:, item][torch.from_numpy(present)]
    ids = given('token_ids')[item][given('token_mask')[item]]
    prefix = torch.cat((model.embed_images(images).flatten(0, 1), model.embed_prompt(ids)))
    valid = reference['prefix_pad'][item]
    note('embeddings', prefix, reference['prefix_embs'][item, valid])

    def ffn(x, mlp, layer: int, step: int):
        y = mlp(x)
        note('FFN inputs', x[0], reference['prefix_ffn_in'][layer, item, valid])
        note('FFN outputs', y[0], reference['prefix_ffn_out'][layer, item, valid])
        return y

    cache = model.prefill(prefix[None], ffn)
    for layer, (k, v) in enumerate(zip(cache.k, cache.v)):
        note('prefix keys', k[0, 0, :cache.length], reference['prefix_k'][layer, item, 0, valid])
        note('prefix values', v[0, 0, :cache.length], reference['prefix_v'][layer, item, 0, valid])

    def dense(x, mlp, layer: int, step: int):
        return mlp(x)

    noise, state = given('noise')[item, None], None
    if model.config.kind == 'pi0':
        state = given('state_padded')[item, None]
    x = noise
    for step in range(model.config.steps):
        velocity = model.velocity(cache, x, step, dense, state)
        note('velocities', velocity[0], reference['velocities'][step, item])
        x = x - velocity / model.config.steps
    note('actions', model.denoise(cache, noise, dense, state)[0], reference['actions_full'][item])


def read_reference(path: str | Path) -> dict[str, np.ndarray]:
    """Read the arrays of a reference file; raises CheckpointError naming what it lacks."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise CheckpointError(f'cannot read the reference {path}: {error}; expected an .npz file with the arrays that '
                              'rmuscle_core/verify.py lists') from error
    missing = [name for name in ARRAYS if name not in arrays]
    if missing:
        raise CheckpointError(f'the reference {path} lacks {", ".join(missing)}; record it again with every stage')
    return arrays


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the command to rmuscle's parser."""
    parser = subparsers.add_parser('verify', help='compare this implementation with recorded outputs of another')
    parser.add_argument('--checkpoint', required=True, help='LeRobot checkpoint directory')
    parser.add_argument('--reference', required=True, help='.npz with the outputs of LeRobot for the same weights')
    parser.add_argument('--device', default='cpu')
    parser.add_argument('--numerics', choices=NUMERICS, default='lerobot', help='how bfloat16 is computed')
    parser.add_argument('--json', action='store_true', help='print one JSON object instead of a table')
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the largest error of each stage; 0 when all are within tolerance, 1 when not."""
    reference = read_reference(options.reference)
    model = load_model(options.checkpoint, options.device, numerics=options.numerics)
    stages = compare(model, reference)
    passed = all(stage.passed for stage in stages)
    if options.json:
        config = model.config
        print(json.dumps({'passed': passed, 'kind': config.kind, 'dtype': config.dtype, 'numerics': config.numerics,
                          'stages': [asdict(stage) | {'passed': stage.passed} for stage in stages]}))
        return 0 if passed else 1
    for stage in stages:
        print(f'{"ok  " if stage.passed else "FAIL"} {stage.name:<14} {stage.error:.1e}  (limit {stage.tolerance:.0e})')
    print(f'{model.config.kind} in {model.config.dtype}: '
          + ('equal within the limits' if passed else 'differs; the first FAIL is where to look'))
    return 0 if passed else 1
