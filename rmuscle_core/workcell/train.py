# SPDX-License-Identifier: Apache-2.0
"""Train the work cell's policy: pi0.5's architecture at a size that a CPU can run in a control loop.

Needs torch, numpy and safetensors, not the simulator: ``python -m rmuscle_core.workcell.train --data FILE --out DIR``.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch

from rmuscle_core.device import open_device
from rmuscle_core.errors import RMuscleError
from rmuscle_core.model import (
    VLA,
    ModelConfig,
    TransformerConfig,
    VisionConfig,
    load_config,
    load_model,
    save_checkpoint,
)
from rmuscle_core.model.checkpoint_config import config_json
from rmuscle_core.options import number, output_folder, positive, whole
from rmuscle_core.processing import ByteTokenizer, write_processors
from rmuscle_core.workcell import dataset
from rmuscle_core.workcell.dataset import Demonstrations
from rmuscle_core.workcell.objective import Objective
from rmuscle_core.workcell.training_data import PromptWriter, TrainingData

NORMALISATION = {'VISUAL': 'IDENTITY', 'STATE': 'QUANTILES', 'ACTION': 'QUANTILES'}
WARM_UP_STEPS, FINAL_RATE = 100, 0.02
EMA_DECAY = 0.998
CHUNK = 16  # actions


def policy_config(demonstrations: Demonstrations, scale: float = 1.0, layers: int = 6, prefix_width: int = 192,
                  execute_steps: int = 12) -> ModelConfig:
    """pi0.5's proportions: one key/value head, prefix FFN 8 times and expert FFN 4 times the width.

    scale: multiplies the widths, for quick tests.
    """
    def sized(width: int) -> int:
        return max(16, int(width * scale) // 16 * 16)

    vision = VisionConfig(image_size=demonstrations.images.shape[2], patch=8, width=sized(128), layers=4,
                          mlp=4 * sized(128), heads=4)
    width, joints = sized(prefix_width), len(demonstrations.joints)
    return ModelConfig(
        kind='pi05', vision=vision, prefix=TransformerConfig(width, layers, 8 * width, 4, 1, width // 4),
        expert=TransformerConfig(sized(128), layers, 4 * sized(128), 4, 1, width // 4), vocab=ByteTokenizer.vocab,
        cameras=tuple(demonstrations.cameras.tolist()), state_dim=joints, action_dim=joints, chunk_size=CHUNK,
        execute_steps=execute_steps, prompt_length=96)


def take_weights(model: VLA, directory: Path, part: str = '') -> None:
    """Start from the tensors of another checkpoint that fit by name and shape; ``part``: beginning of their names."""
    own = model.state_dict()
    fitting = {name: value for name, value in load_model(directory).state_dict().items()
               if name.startswith(part) and name in own and own[name].shape == value.shape}
    if not fitting:
        raise RMuscleError(f'no tensor of {directory} has the name and shape of one of {part or "the model"}; '
                           'train from scratch, or with the sizes that checkpoint has')
    model.load_state_dict({**own, **fitting})


class Trainer:
    """One training run: what changes from step to step, and the two kinds of step."""

    def __init__(self, demonstrations: Demonstrations, config: ModelConfig, args: argparse.Namespace):
        torch.manual_seed(args.seed)
        torch.set_float32_matmul_precision('high')
        self.args, self.on_cuda = args, args.device.startswith('cuda')
        self.data = TrainingData(demonstrations, config.chunk_size, args.device)
        prompts = PromptWriter(str(demonstrations.task), config.action_dim, args.device)
        model = VLA(config)
        if args.vision_from:
            take_weights(model, args.vision_from, 'vision.')
        if args.start:
            take_weights(model, args.start)
        self.objective = Objective(model, prompts, self.data.landmark_scale.size).to(args.device)
        self.average = copy.deepcopy(self.objective).requires_grad_(False)
        self.rate = torch.zeros((), device=args.device)
        decayed = [p for p in self.objective.parameters() if p.ndim > 1]
        others = [p for p in self.objective.parameters() if p.ndim < 2]
        self.optimizer = torch.optim.AdamW(
            [{'params': decayed, 'weight_decay': 0.05}, {'params': others, 'weight_decay': 0.0}], lr=self.rate,
            betas=(0.9, 0.95), fused=True, capturable=self.on_cuda)

    def precision(self) -> torch.autocast | nullcontext:
        """bfloat16 matrix products, or float32."""
        device = 'cuda' if self.on_cuda else 'cpu'
        return torch.autocast(device, torch.bfloat16) if self.args.bfloat16 else nullcontext()

    def locate_step(self) -> torch.Tensor:
        """Learn to see: still frames only, vision only."""
        with self.precision():
            loss = self.objective.look_loss(self._draw('located', self.args.batch))
        return self._descend(loss)

    def policy_step(self) -> torch.Tensor:
        """Learn to act, and keep seeing."""
        with self.precision():
            flow, seen = self.objective.losses(self._draw('demonstrated', self.args.batch), self.args.repeats)
            if self.args.locate_weight:
                looked = self.objective.look_loss(self._draw('located', self.args.batch))
                flow = flow + self.args.locate_weight * (seen + looked)
        return self._descend(flow)

    def _draw(self, kind: str, count: int):
        frames = getattr(self.data, kind)
        return frames.take(torch.randint(len(frames), (count,), device=self.args.device))

    def _descend(self, loss: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.objective.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()

    def set_rate(self, progress: float, step: int) -> None:
        """Linear warm-up in steps, then a cosine over the run's ``progress`` from 0 to 1."""
        cosine = FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        self.rate.fill_(self.args.rate * min(1.0, (step + 1) / WARM_UP_STEPS) * cosine)

    def update_average(self, step: int) -> None:
        """Exponential moving average, shorter while the run is young."""
        torch._foreach_lerp_(list(self.average.parameters()), list(self.objective.parameters()),
                             1 - min(EMA_DECAY, (step + 1) / (step + 10)))

    def captured(self, step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """The whole step as one CUDA graph, drawing of frames, backward pass and optimizer included.

        A model of this size is otherwise bound by launching kernels. Three warm-up steps are real training steps.
        """
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = step()

        def replay() -> torch.Tensor:
            graph.replay()
            return loss
        return replay

    @torch.no_grad()
    def validate(self) -> str:
        """Held-out losses of the averaged weights, with the same noise every time."""
        held, located = self.data.held_demonstrated, self.data.held_located
        if not len(held) or not len(located):
            return 'nothing held out'
        few = held.take(torch.arange(0, len(held), max(1, len(held) // 128), device=self.args.device))
        some = located.take(torch.arange(0, len(located), max(1, len(located) // 256), device=self.args.device))
        model = self.average.model
        model.train()  # drops the modulations of the weights as they were
        model.eval()
        with torch.random.fork_rng(devices=[self.args.device] if self.on_cuda else []), self.precision():
            torch.manual_seed(1)
            flow, actions = self.average.losses(few, 4, augment=False)[0], self.average.action_error(few)
            errors = self.average.locate(*self.average.prefill(some, augment=False)) - some.landmarks
        metres = errors.float().cpu() * torch.from_numpy(self.data.landmark_scale)
        seen = ' / '.join(f'{100 * error:.2f}' for error in metres.square().mean((1, 2)).sqrt())
        return f'held out: flow {flow:.4f}, actions {actions:.4f}, landmarks {seen} cm'

    def save(self, directory: Path) -> None:
        """Write the averaged policy as a LeRobot checkpoint, weights in bfloat16."""
        model = self.average.model
        save_checkpoint(model, directory, {'rmuscle_tokenizer': 'byte'}, storage=torch.bfloat16)
        json = config_json(model.config)
        write_processors(directory, model.config.kind, {**json['input_features'], **json['output_features']},
                         self.data.statistics, NORMALISATION, model.config.prompt_length)

    def run(self) -> int:
        """Train until the time or the number of steps is used up; return the steps made."""
        args, start = self.args, time.monotonic()
        locate, act = self.locate_step, self.policy_step
        if self.on_cuda and args.capture:
            self.set_rate(0.0, 0)
            locate, act = self.captured(locate), self.captured(act)
        step, loss, reported = 0, None, start
        while True:
            if self.on_cuda and step % 10 == 0:
                torch.cuda.synchronize()  # the host would otherwise queue steps far past the end of the time
            now = time.monotonic()
            progress = max((now - start) / (60 * args.minutes), step / args.steps if args.steps else 0.0)
            if loss is not None and (now - reported > args.report or progress >= 1):
                print(f'step {step}, {now - start:.0f} s, loss {float(loss):.4f}, {self.validate()}', flush=True)
                self.save(args.out)
                reported = time.monotonic()
            if progress >= 1:
                return step
            self.set_rate(progress, step)
            loss = (locate if progress < args.look_first else act)()
            self.update_average(step)
            step += 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of a training run."""
    parser.add_argument('--data', type=Path, nargs='+', required=True, help='demonstration files of one task')
    parser.add_argument('--out', type=output_folder, required=True, help='checkpoint directory to write')
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu',
                        help='where to train: cpu, cuda, ... (default: the GPU, if there is one)')
    parser.add_argument('--minutes', type=positive, default=30.0, help='time limit, minutes (default: %(default)s)')
    parser.add_argument('--steps', type=whole(0), default=0, help='step limit, reproducible; 0: by time alone '
                        '(default: %(default)s)')
    parser.add_argument('--batch', type=whole(1), default=96, help='frames of one step (default: %(default)s)')
    parser.add_argument('--repeats', type=whole(1), default=4, help='draws of noise and time for one frame (default: '
                        '%(default)s)')
    parser.add_argument('--rate', type=positive, default=8e-4, help='peak learning rate (default: %(default)s)')
    parser.add_argument('--look-first', type=number(0, 1), default=0.12, help='share of the run spent on still frames '
                        'alone (default: %(default)s)')
    parser.add_argument('--report', type=positive, default=20.0, help='seconds between validations, each saves '
                        '(default: %(default)s)')
    parser.add_argument('--cameras', nargs='+', metavar='CAMERA', help='views to train on, of those recorded '
                        '(default: all)')
    parser.add_argument('--bfloat16', action=argparse.BooleanOptionalAction, default=torch.cuda.is_available(),
                        help='bfloat16 matrix products (default: on a GPU)')
    parser.add_argument('--scale', type=positive, default=1.0, help='multiplies the widths of the model (default: '
                        '%(default)s)')
    parser.add_argument('--vision-from', type=Path, metavar='DIR', help='start from the vision tower of this '
                        'checkpoint (default: from scratch)')
    parser.add_argument('--start', type=Path, metavar='DIR', help='go on from this checkpoint (default: from scratch)')
    parser.add_argument('--locate-weight', type=number(), default=0.5, help='weight of the localisation losses beside '
                        'acting (default: %(default)s)')
    parser.add_argument('--execute', type=whole(1, CHUNK), default=12, help='commands of a chunk that a robot is to '
                        f'execute, of {CHUNK} (default: %(default)s)')
    parser.add_argument('--layers', type=whole(1, 64), default=6, help='layers of prefix and expert (default: '
                        '%(default)s)')
    parser.add_argument('--prefix-width', type=whole(16, 4096), default=192, help='width of the prefix; its FFN is 8 '
                        'times as wide (default: %(default)s)')
    parser.add_argument('--seed', type=whole(0), default=0, help='seed of weights and draws (default: %(default)s)')
    parser.add_argument('--no-capture', dest='capture', action='store_false', help='do not use CUDA graphs')


def run_train(args: argparse.Namespace) -> int:
    """Train and save; a run that is interrupted leaves its last report's checkpoint."""
    start = time.monotonic()
    open_device(args.device)
    for checkpoint in filter(None, (args.vision_from, args.start)):
        load_config(checkpoint)
    demonstrations = dataset.join([dataset.read(path) for path in args.data])
    if args.cameras:
        demonstrations = demonstrations.seen_by(args.cameras)
    if len(demonstrations.images) < args.batch or not len(demonstrations.located_images):
        raise RMuscleError(f'{", ".join(map(str, args.data))}: {len(demonstrations.images)} frames and '
                           f'{len(demonstrations.located_images)} still frames, too few for batches of {args.batch}; '
                           'record more or lower --batch')
    config = policy_config(demonstrations, args.scale, args.layers, args.prefix_width, args.execute)
    trainer = Trainer(demonstrations, config, args)
    size = sum(p.numel() for p in trainer.objective.model.parameters())
    print(f'{size / 1e6:.2f} M parameters, {len(trainer.data.demonstrated)} frames, loaded in '
          f'{time.monotonic() - start:.0f} s, {args.device}', flush=True)
    trainer.run()
    return 0


def main() -> int:
    """Entry of ``python -m rmuscle_core.workcell.train``."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    return run_train(parser.parse_args())


if __name__ == '__main__':
    raise SystemExit(main())
