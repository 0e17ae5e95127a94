# SPDX-License-Identifier: Apache-2.0
"""``rmuscle verify``: does a checkpoint compute here what it computes elsewhere, and if not, what differs first?

With a reference, elsewhere is LeRobot, whose outputs for one batch are stored; with a second checkpoint directory, that
one, on inputs drawn at random. Token ids and noise are fed in both, so that a difference is not the tokenizer's.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch

from rmuscle_core.errors import CheckpointError
from rmuscle_core.model import VLA, load_config, load_model
from rmuscle_core.model.config import DTYPES, NUMERICS
from rmuscle_core.options import add_device, output_file
from rmuscle_core.processing.processor import read_recipe
from rmuscle_core.processing.recipe import Recipe
from rmuscle_core.reference_outputs import check_fits, dense, read_reference, record

# Largest absolute difference allowed. In bfloat16 one unit in the last place of a value in [4, 8) is 3.1e-2, and
# kernels may round differently; what counts, the actions, averages that out. Before the network all is float32.
PREPROCESSING = ('images', 'normalised state')
HIDDEN = ('prefix keys', 'prefix values', 'FFN inputs', 'FFN outputs', 'velocities')
STAGES = (*PREPROCESSING, 'embeddings', *HIDDEN, 'actions')
EXACT = dict.fromkeys(PREPROCESSING, 1e-5)
TOLERANCES = {'float32': dict.fromkeys(STAGES, 1e-4) | EXACT,
              'bfloat16': dict.fromkeys(STAGES, 5e-2) | {'embeddings': 2e-2, 'actions': 2e-2} | EXACT,
              'fast': dict.fromkeys(STAGES, 1e-1) | {'actions': 2e-2} | EXACT}


@dataclass
class Stage:
    """One compared stage, in the order of computation; error is the largest absolute difference."""

    name: str
    tolerance: float
    error: float = 0.0

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance  # False for NaN


@dataclass
class Comparison:
    """stages: those that were compared. first: where a limit was first exceeded in the order of computation.

    dimensions: error of each action dimension, in the policy's scale. robot: the same in robot units, if compared.
    """

    stages: dict[str, Stage] = field(default_factory=dict)
    first: str = ''
    dimensions: np.ndarray | None = None
    robot: np.ndarray | None = None

    @property
    def passed(self) -> bool:
        return all(stage.passed for stage in self.stages.values())


class _Comparer:
    """Collects differences of one model as its stages are computed."""

    def __init__(self, model: VLA) -> None:
        config = model.config
        exact = config.dtype == 'float32' or config.numerics == 'lerobot'
        self.limits = TOLERANCES[config.dtype if exact else 'fast']
        self.found = Comparison()

    def note(self, name: str, ours, theirs, where: str = '') -> None:
        """Compare two arrays or tensors of one stage."""
        difference = np.abs(_numpy(ours) - _numpy(theirs)).max(initial=0)
        stage = self.found.stages.setdefault(name, Stage(name, self.limits[name]))
        stage.error = float(np.maximum(difference, stage.error))  # keeps a NaN
        if not self.found.first and not difference <= stage.tolerance:
            self.found.first = f'{name}{where}'


def compare(model: VLA, reference: Mapping[str, np.ndarray], recipe: Recipe | None = None) -> Comparison:
    """Run every item of the reference batch alone, as a policy call would, and compare it stage by stage.

    recipe: compares the preprocessing too, of a reference that holds raw pictures, states and robot actions.
    """
    check_fits(model, reference)
    comparer = _Comparer(model)
    for item in range(len(reference['noise'])):
        if recipe and 'images_u8' in reference:
            _compare_inputs(recipe, reference, item, comparer)
        actions = _compare_network(model, reference, item, comparer)
        expected = reference['actions_full'][item]
        found = comparer.found
        found.dimensions = _worst(found.dimensions, actions[:, :model.config.action_dim], expected)
        if recipe and 'actions_unnormalized' in reference:
            robot = recipe.to_robot(actions, reference['raw_state'][item])
            found.robot = _worst(found.robot, robot, reference['actions_unnormalized'][item])
    found = comparer.found
    found.stages = {name: found.stages[name] for name in STAGES if name in found.stages}
    return found


def _worst(so_far: np.ndarray | None, ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    error = np.abs(ours - theirs[:, :ours.shape[1]]).max(0)
    return error if so_far is None else np.maximum(so_far, error)


def _numpy(values) -> np.ndarray:
    return values.detach().float().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values, np.float32)


def _compare_inputs(recipe: Recipe, reference: Mapping[str, np.ndarray], item: int, comparer: _Comparer) -> None:
    """From raw pictures and states; the reference's cameras come in checkpoint order, masked views after them."""
    raw = reference['images_u8'][:, item]
    pictures = {name: picture.transpose(1, 2, 0) for name, picture in zip(recipe.views.cameras, raw)}
    images, views = recipe.views.encode(pictures)
    comparer.note('images', images, reference['images_preprocessed'][:len(views), item])
    state, _ = recipe.forward(reference['raw_state'][item])
    comparer.note('normalised state', state, reference['state_normalized'][item])


@torch.inference_mode()
def _compare_network(model: VLA, reference: Mapping[str, np.ndarray], item: int, comparer: _Comparer) -> np.ndarray:
    """Return our actions [H,A_pad]."""
    def given(name: str) -> torch.Tensor:
        return torch.from_numpy(reference[name]).to(model.prefix_weight.device)

    present = torch.from_numpy(reference['image_masks'][:, item])
    images = given('images_preprocessed')[:, item][present]
    ids = given('token_ids')[item][given('token_mask')[item]]
    prefix = torch.cat((model.embed_images(images).flatten(0, 1), model.embed_prompt(ids)))
    valid = reference['prefix_pad'][item]
    comparer.note('embeddings', prefix, reference['prefix_embs'][item, valid])
    layers: list[tuple[torch.Tensor, torch.Tensor]] = []

    def ffn(x, mlp, layer: int, step: int):
        layers.append((x[0], mlp(x)[0]))
        return layers[-1][1][None]

    cache = model.prefill(prefix[None], ffn)
    for layer, (k, v) in enumerate(zip(cache.k, cache.v)):
        where = f' of layer {layer}'
        comparer.note('prefix keys', k[0, 0, :cache.length], reference['prefix_k'][layer, item, 0, valid], where)
        comparer.note('prefix values', v[0, 0, :cache.length], reference['prefix_v'][layer, item, 0, valid], where)
        if layer < len(layers):  # the last layer's FFN cannot reach the actions
            for name, key, ours in zip(HIDDEN[2:], ('prefix_ffn_in', 'prefix_ffn_out'), layers[layer]):
                comparer.note(name, ours, reference[key][layer, item, valid], where)
    noise = given('noise')[item, None]
    state = given('state_padded')[item, None] if model.config.kind == 'pi0' else None
    x = noise
    for step in range(model.config.steps):
        velocity = model.velocity(cache, x, step, dense, state)
        comparer.note('velocities', velocity[0], reference['velocities'][step, item], f' of step {step}')
        x = x - velocity / model.config.steps
    actions = model.denoise(cache, noise, dense, state)[0]
    comparer.note('actions', actions, reference['actions_full'][item])
    return _numpy(actions)


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the command to rmuscle's parser."""
    parser = subparsers.add_parser(
        'verify', help='compare a checkpoint with recorded outputs or with another one',
        description='Computes every stage of a policy call and prints the largest difference of each. Exit code 1 when '
                    'one exceeds its limit.')
    parser.add_argument('--checkpoint', type=Path, required=True, help='LeRobot or openpi checkpoint directory')
    other = parser.add_mutually_exclusive_group(required=True)
    other.add_argument('--reference', type=Path, help='.npz with the outputs of LeRobot, or of --record, for the same '
                       'weights')
    other.add_argument('--against', type=Path, help='another checkpoint directory, such as the one this was converted '
                       'from')
    other.add_argument('--record', type=output_file, help='write the outputs for random inputs to this .npz instead of '
                       'comparing')
    add_device(parser)
    parser.add_argument('--dtype', choices=tuple(DTYPES), help="type to compute in (default: the checkpoint's)")
    parser.add_argument('--numerics', choices=NUMERICS, default='lerobot', help='bfloat16 rounded where LeRobot '
                        'rounds, or faster (default: %(default)s)')
    parser.add_argument('--json', action='store_true', help='print one JSON object instead of a table')
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the largest error of each stage; 0 when all are within tolerance, 1 when not."""
    if options.record:
        model, recipe = _load(options.checkpoint, options)
        options.record.parent.mkdir(parents=True, exist_ok=True)
        with options.record.open('wb') as file:  # by name, numpy would add .npz
            np.savez(file, **record(model, recipe))
        print(f'wrote {options.record}; compare with: rmuscle verify --checkpoint DIR --reference {options.record}')
        return 0
    other: dict[str, str] = {}
    if options.against:
        _check_comparable(options.checkpoint, options.against)
        model, recipe = _load(options.against, options)
        reference, other = record(model, recipe), recipe.report()
        del model  # two of full size need not fit
    else:
        reference = read_reference(options.reference)
    model, recipe = _load(options.checkpoint, options)
    report = recipe.report()
    rules = [f'{name}: {report.get(name)} here, {other.get(name)} there' for name in {**report, **other}
             if other and report.get(name) != other.get(name)]
    found = compare(model, reference, recipe)
    (_print_json if options.json else _print_table)(model, found, report, rules)
    return 0 if found.passed and not rules else 1


def _check_comparable(first: Path, second: Path) -> None:
    """Raise CheckpointError naming the sizes in which two checkpoints differ."""
    one, other = map(_sizes, (first, second))
    differing = [f'{name} ({value} and {other[name]})' for name, value in one.items() if value != other[name]]
    if differing:
        raise CheckpointError(f'{first} and {second} hold different models and cannot be compared; they differ in '
                              f'{", ".join(differing)}; give --against a checkpoint of the same model and robot')


def _sizes(directory: Path) -> dict[str, object]:
    config = load_config(directory)
    names = ('kind', 'state_dim', 'action_dim', 'padded_dim', 'chunk_size', 'steps', 'vocab')
    return {**{name: getattr(config, name) for name in names}, 'cameras': len(config.cameras),
            **{f'{part} {name}': value for part in ('vision', 'prefix', 'expert')
               for name, value in asdict(getattr(config, part)).items()}}


def _load(directory: Path, options: argparse.Namespace) -> tuple[VLA, Recipe]:
    model = load_model(directory, options.device, options.dtype, options.numerics)
    return model, read_recipe(directory, model.config)


def _print_json(model: VLA, found: Comparison, report: dict[str, str], rules: list[str]) -> None:
    config = model.config
    stages = [asdict(stage) | {'passed': stage.passed} for stage in found.stages.values()]
    robot = None if found.robot is None else found.robot.tolist()
    print(json.dumps({'passed': found.passed and not rules, 'first': found.first, 'kind': config.kind,
                      'dtype': config.dtype, 'numerics': config.numerics, 'stages': stages,
                      'preprocessing': report, 'differing': rules,
                      'action_dimensions': found.dimensions.tolist(), 'robot_units': robot}))


def _print_table(model: VLA, found: Comparison, report: dict[str, str], rules: list[str]) -> None:
    for name, choice in report.items():
        print(f'     {name}: {choice}')
    for rule in rules:
        print(f'FAIL preprocessing differs, {rule}')
    for stage in found.stages.values():
        word = 'ok  ' if stage.passed else 'FAIL'
        print(f'{word} {stage.name:<16} {stage.error:.1e}  (limit {stage.tolerance:.0e})')
    print(f'per action dimension: {" ".join(f"{error:.0e}" for error in found.dimensions)}')
    if found.robot is not None:
        print(f'in robot units:       {" ".join(f"{error:.0e}" for error in found.robot)}')
    verdict = 'equal within the limits' if found.passed else f'the first difference is in: {found.first}'
    print(f'{model.config.kind} in {model.config.dtype}: {verdict}')
