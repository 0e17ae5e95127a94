# SPDX-License-Identifier: Apache-2.0
"""``rmuscle characterize``: does this policy, on these executions, have what the caches live on?"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add ``characterize``."""
    parser = subparsers.add_parser('characterize', help='what repeated executions have in common inside the model')
    parser.add_argument('--checkpoint', type=Path, required=True, help='policy directory')
    parser.add_argument('--episodes', type=Path, required=True, help='recording of raw observations (HDF5)')
    parser.add_argument('--references', type=int, help='episodes that serve as references (default: half)')
    parser.add_argument('--calls', type=int, default=0, help='compare at most so many calls (default: all)')
    parser.add_argument('--device', default='cpu')
    parser.add_argument('--out', type=Path, required=True, help='folder for characterization.json and .png')
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, print, write numbers and a picture."""
    from rmuscle_core.bench import report
    from rmuscle_core.evaluation.characterize import characterise
    from rmuscle_core.evaluation.characterize_picture import draw
    from rmuscle_core.library.recording import open_recording
    from rmuscle_core.policy import MusclePolicy
    from rmuscle_core.settings import Settings

    with open_recording(args.episodes) as recording:
        episodes = [episode for episode in recording if episode.success and episode.observations]
        joints = recording.joints
    policy = MusclePolicy.load(args.checkpoint, Settings(mode='full'), device=args.device)
    with report.progress_bar() as bar:
        task = bar.add_task('calls', total=None)
        found = characterise(policy, episodes, joints, args.references or len(episodes) // 2, args.calls,
                             lambda done, total: bar.update(task, completed=done, total=total))
    policy.close()
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
