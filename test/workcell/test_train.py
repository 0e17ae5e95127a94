# SPDX-License-Identifier: Apache-2.0
"""Training: the model is shown what a policy call will show it, and a run leaves a checkpoint a policy can load."""

from __future__ import annotations

import argparse
import subprocess
import sys

import numpy as np
import pytest
import torch

from rmuscle_core.errors import RMuscleError
from rmuscle_core.model import load_model
from rmuscle_core.observation import Observation
from rmuscle_core.processing import Processor
from rmuscle_core.workcell import dataset, train
from rmuscle_core.workcell.objective import Objective, dense, disturb, to_pixels
from rmuscle_core.workcell.training_data import PromptWriter, TrainingData, widened

SCALE = 0.1


def options(data, out, *extra: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    return parser.parse_args(['--data', str(data), '--out', str(out), '--device', 'cpu', '--batch', '4', '--repeats',
                              '2', '--scale', str(SCALE), '--minutes', '5', '--steps', '3', *extra])


@pytest.fixture(scope='module')
def run(tmp_path_factory, demonstrations):
    """A finished run of three steps: (checkpoint directory, demonstrations, trainer)."""
    directory = tmp_path_factory.mktemp('run')
    trainer = train.Trainer(demonstrations, train.policy_config(demonstrations, SCALE),
                            options('unused', directory / 'checkpoint', '--look-first', '0.34'))
    assert trainer.run() == 3
    return directory / 'checkpoint', demonstrations, trainer


def test_the_checkpoint_loads_and_its_processor_shows_what_training_showed(run):
    directory, demonstrations, trainer = run
    model = load_model(directory)
    processor = Processor.from_checkpoint(directory, model.config)
    held = demonstrations.episodes % 15 == 14
    images, state = demonstrations.images[held][0], demonstrations.states[held][0]
    inputs = processor.encode(Observation(dict(zip(model.config.cameras, images)), state, 'transfer cube'))

    frame = trainer.data.held_demonstrated.take(torch.tensor([0]))
    torch.testing.assert_close(to_pixels(frame.images)[0], inputs.images)
    prompts = PromptWriter('transfer cube', 14, 'cpu')
    assert prompts(frame.states)[0].tolist() == inputs.token_ids.tolist()
    decoded = processor.decode(frame.chunks[0], Observation({}, state, ''))
    np.testing.assert_allclose(decoded, demonstrations.chunks(16)[held][0], atol=1e-5)


def test_the_checkpoint_holds_the_averaged_weights(run):
    directory, _, trainer = run
    stored = dict(load_model(directory).named_parameters())
    for name, weight in trainer.average.model.named_parameters():
        torch.testing.assert_close(stored[name], weight.bfloat16().float(), msg=name)
    live = dict(trainer.objective.model.named_parameters())
    assert any(not torch.equal(live[name], weight) for name, weight in trainer.average.model.named_parameters())


def test_a_run_can_start_from_another_checkpoint_or_its_vision_alone(run):
    directory, _, trainer = run
    config = trainer.objective.model.config
    for part in ('', 'vision.'):
        model = train.VLA(config)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        train.take_weights(model, directory, part)
        stored = dict(load_model(directory).named_parameters())
        for name, weight in model.named_parameters():
            source = stored if name.startswith(part) else before
            assert torch.equal(weight, source[name]), name
    with pytest.raises(RMuscleError, match=r'no tensor of .* has the name and shape of one of nose'):
        train.take_weights(model, directory, 'nose')


def test_padding_dimensions_cannot_reach_the_actions(run):
    directory, _, _ = run
    model = load_model(directory)
    joints = model.config.action_dim
    prefix = torch.randn(1, 5, model.config.prefix.width)
    noise = torch.randn(1, model.config.chunk_size, model.config.padded_dim)
    other = noise.clone()
    other[..., joints:] = 7.0
    with torch.inference_mode():
        first, second = (model.denoise(model.prefill(prefix, dense), x, dense) for x in (noise, other))
    assert torch.equal(first[..., :joints], second[..., :joints])
    assert torch.equal(second[..., joints:], other[..., joints:])


def test_a_run_of_steps_can_be_repeated(demonstrations, tmp_path):
    weights = []
    for name in 'ab':
        trainer = train.Trainer(demonstrations, train.policy_config(demonstrations, SCALE),
                                options('unused', tmp_path / name))
        trainer.run()
        weights.append((tmp_path / name / 'model.safetensors').read_bytes())
    assert weights[0] == weights[1]


def test_both_losses_can_be_driven_down(demonstrations, tmp_path):
    """Eight frames by heart: every part that should learn is connected."""
    trainer = train.Trainer(demonstrations, train.policy_config(demonstrations, SCALE), options('unused', tmp_path))
    few = trainer.data.demonstrated.take(torch.arange(8))
    trainer.rate.fill_(3e-3)

    def losses() -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        return trainer.objective.losses(few, 4, augment=False)

    before = losses()
    for _ in range(60):
        flow, seen = losses()
        trainer._descend(flow + seen)
    after = losses()
    assert after[0] < 0.6 * before[0] and after[1] < 0.2 * before[1]


def test_disturbed_frames_keep_their_views_alike_and_may_lose_their_state():
    torch.manual_seed(0)
    pixels, states = disturb(torch.zeros(200, 3, 3, 4, 4), torch.ones(200, 5))
    assert torch.equal(pixels[:, 0], pixels[:, 2]) and not torch.equal(pixels[0], pixels[1])
    blank = (states == 0).all(1)
    assert 0.15 < blank.float().mean() < 0.45
    assert (states[~blank] - 1).abs().max() < 0.5


@pytest.mark.parametrize('states', [torch.linspace(-1.2, 1.2, 14)[None], torch.rand(3, 14) * 2 - 1])
def test_prompts_of_batches(states):
    from rmuscle_core.processing import ByteTokenizer, prompt_ids

    ids = PromptWriter('transfer cube', 14, 'cpu')(states)
    for row, state in zip(ids, states):
        assert row.tolist() == prompt_ids('pi05', 'transfer cube', state.numpy(), ByteTokenizer(), 200)[0]


def test_a_joint_that_hardly_moves_is_not_blown_up():
    found = widened({'q01': np.array([0.0, 0.2]), 'q99': np.array([0.001, 1.2])})
    np.testing.assert_allclose(found['q99'] - found['q01'], [0.1, 1.0])
    np.testing.assert_allclose((found['q99'] + found['q01'])[0], 0.001)


def test_held_out_episodes_are_not_trained_on(demonstrations):
    data = TrainingData(demonstrations, 16, 'cpu')
    trained, held = (frames.images.flatten(1) for frames in (data.demonstrated, data.held_demonstrated))
    assert len(trained) + len(held) == 64 and len(held) == 4
    assert not any((trained == image).all(1).any() for image in held)


def test_the_full_size_policy_is_small_enough_to_ship(demonstrations):
    from dataclasses import replace

    config = train.policy_config(demonstrations)
    config = replace(config, vision=replace(config.vision, image_size=64))
    weights = sum(p.numel() for p in Objective(train.VLA(config), None, 2).model.parameters())
    assert 2 * weights < 18e6


def test_too_little_data_is_refused(tmp_path, demonstrations):
    path = tmp_path / 'demos.npz'
    dataset.write(path, demonstrations)
    with pytest.raises(RMuscleError, match='64 frames and 30 still frames, too few for batches of 100'):
        train.run_train(options(path, tmp_path / 'out', '--batch', '100'))


def test_training_needs_no_simulator_and_no_kernels():
    """It runs on a rented GPU from a bare checkout: as if none of these were installed."""
    code = ('import sys; sys.modules |= dict.fromkeys(["mujoco", "gym_aloha", "triton", "rmuscle_kernels", "h5py", '
            '"rclpy", "rich"]); import rmuscle_core.workcell.train')
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
