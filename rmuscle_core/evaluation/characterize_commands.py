# SPDX-License-Identifier: Apache-2.0
"""``rmuscle characterize``: does this policy, on these executions, have what the caches live on?"""

from __future__ import annotations

import argparse
import json
from contextlib import closing
from pathlib import Path

from rmuscle_core.importing.options import EPISODES, add_source_options, source_of
from rmuscle_core.options import add_device, output_folder, whole


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add ``characterize``."""
    parser = subparsers.add_parser(
        'characterize', help='what repeated executions have in common inside the model',
        description='Compares every call of the later episodes with the most similar call of the earlier ones, '
                    'and as a yardstick with the call of the same number in another of them. Three episodes at least.')
    parser.add_argument('--checkpoint', type=Path, required=True, help='LeRobot or openpi checkpoint directory')
    parser.add_argument('--episodes', type=Path, required=True, help=EPISODES)
    parser.add_argument('--references', type=whole(2), metavar='N', help='episodes that serve as references (default: '
                        'half, two at least)')
    parser.add_argument('--calls', type=whole(0), default=0, metavar='N', help='compare at most so many calls, 0 for '
                        'all (default: %(default)s)')
    add_device(parser)
    parser.add_argument('--out', type=output_folder, required=True, help='folder for characterization.json and .png')
    add_source_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, print, write numbers and a picture."""
    from rmuscle_core.bench import report
    from rmuscle_core.evaluation.characterize import characterise
    from rmuscle_core.evaluation.characterize_picture import draw
    from rmuscle_core.model import load_config
    from rmuscle_core.policy import MusclePolicy
    from rmuscle_core.replay.session import read_or_skip
    from rmuscle_core.settings import Settings

    skipped: list[tuple[str, str]] = []
    with source_of(args.episodes, args, load_config(args.checkpoint)) as source:
        read = [episode for pending in source if (episode := read_or_skip(pending, skipped))]
        joints, cameras = source.joints, source.cameras or None
    skipped += [(episode.name, 'it did not succeed') for episode in read if not episode.success]
    episodes = [episode for episode in read if episode.success]
    for name, reason in skipped:
        print(f'{name} was skipped: {reason}')
    policy = MusclePolicy.load(args.checkpoint, Settings(mode='full'), device=args.device, cameras=cameras)
    with closing(policy), report.progress_bar() as bar:
        task = bar.add_task('calls', total=None)
        found = characterise(policy, episodes, joints, args.references or max(2, len(episodes) // 2),
                             args.calls, lambda done, total: bar.update(task, completed=done, total=total))
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / 'characterization.json').write_text(json.dumps(found, indent=1) + '\n')
    draw(found, args.out / 'characterization.png')
    show(found)
    print(f'written to {args.out}')
    return 0


def show(found: dict) -> None:
    """Print one line per quantity, matched reference beside the call of the same number."""
    from rmuscle_core.bench.report import print_table

    def text(value: float | list) -> str:
        return ' '.join(f'{v:.3f}' for v in value) if isinstance(value, list) else f'{value:.3f}'

    def cell(part: str, name: str) -> str:
        value = found[part][name]
        return text(sum(value) / len(value) if name.startswith('ffn_') else value)

    shares = ' '.join(f'{share:.0%}' for share in found['shares'])
    titles = {'ffn_input_cosine': 'FFN input cosine, mean over layers', 'ffn_output_cosine': 'FFN output cosine',
              'action_cosine': 'action chunk cosine, same noise',
              'output_change_covered': f'output change covered by the tokens whose input changed most, {shares}',
              'contribution_covered': f'contribution covered by the own top neurons, {shares}',
              'covered_by_reference': f"the same by the reference's top neurons, {shares}",
              'mask_overlap': f'neurons in common with the reference, {shares}',
              'consecutive_steps_overlap': f'neurons in common between consecutive steps, {shares}',
              'first_last_step_overlap': f'neurons in common between first and last step, {shares}',
              'covered_at_half_by_shared_mask': 'covered at 50 %, mask shared over '
                                                f'{", ".join(map(str, found["shared_steps"]))} steps'}
    rows = [[title, cell('matched', name), cell('same_number', name)] for name, title in titles.items()]
    rows += [[f'path cosine, {arm}', text(value), None] for arm, value in found['path_cosine'].items()]
    print_table(f'{found["calls"]} calls against {found["reference_episodes"]} reference episodes',
                ['', 'matched reference', 'same call of another episode'], rows)
