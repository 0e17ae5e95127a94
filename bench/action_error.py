# SPDX-License-Identifier: Apache-2.0
"""How far the caches move the actions of a policy, each alone and both, with the residual or not; and 8-bit weights.

    python bench/action_error.py --checkpoint DIR --recording FILE

Each call takes the most similar call of another episode as its reference, as retrieval does. The difference to the
dense actions is given in percent of their size (normalised units), beside that of replaying the reference's chunk.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch
from sketch import recorded_pairs

from rmuscle_core.bench.calls import expand, record
from rmuscle_core.bench.report import print_table
from rmuscle_core.engine.eager import EagerEngine
from rmuscle_core.engine.plan import CallPlan, plan_call
from rmuscle_core.library import ReferenceId
from rmuscle_core.model import load_model
from rmuscle_core.processing import ModelInputs
from rmuscle_core.settings import PROFILES, RESIDUALS, Settings

CASES = [('context', 'reference'), *(('action', kind) for kind in RESIDUALS), *(('full', kind) for kind in RESIDUALS)]


def errors(engine: EagerEngine, narrow: EagerEngine, now: ModelInputs,
           then: ModelInputs) -> dict[tuple[str, str, str], float]:
    """Percent of the dense actions' size, by profile, mode and residual; narrow has the same weights in 8 bits."""
    joints = engine.model.config.action_dim
    reference = record(engine, then, ReferenceId('bench', 'reference', 0))
    replayed, _ = engine.act(engine.embed(then), CallPlan(), None)
    embedded = engine.embed(now)
    dense, _ = engine.act(embedded, CallPlan(), None)

    def error(actions: torch.Tensor) -> float:
        return float(100 * (actions - dense)[:, :joints].norm() / dense[:, :joints].norm())

    eight_bit, _ = narrow.act(narrow.embed(now), CallPlan(), None)
    found = {('', 'replay', ''): error(replayed), ('', 'dense, 8-bit weights', ''): error(eight_bit)}
    for profile in PROFILES:
        settings = Settings().with_values(profile=profile)
        expand(engine, reference, 0, plan_call(settings, engine.model.config, embedded.tokens, embedded.text))
        for mode, residual in CASES:
            plan = plan_call(replace(settings, mode=mode, residual=residual), engine.model.config, embedded.tokens,
                             embedded.text)
            found[profile, mode, residual if mode != 'context' else ''] = error(engine.act(embedded, plan, 0)[0])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--checkpoint', type=Path, required=True)
    parser.add_argument('--recording', type=Path, required=True)
    parser.add_argument('--calls', type=int, default=12, help='pairs of recorded calls (%(default)s)')
    args = parser.parse_args()
    model, pairs = recorded_pairs(args.checkpoint, args.recording, args.calls)
    engine, narrow = (EagerEngine(m, Settings(slots=1), len(model.config.cameras)) for m in (
        model, load_model(args.checkpoint, dtype='float32', weight_dtype='fp8')))
    found = [errors(engine, narrow, now, then) for now, then in pairs]
    rows = [[*case, *torch.tensor([[e[case] for e in found]]).quantile(torch.tensor([0.5, 0.9])).tolist()]
            for case in found[0]]
    columns = ['profile', 'mode', 'residual', 'median %', 'p90 %']
    print_table(f'difference to dense actions, {len(found)} calls', columns, rows)
    print(json.dumps([dict(zip(('profile', 'mode', 'residual', 'median', 'p90'), row)) for row in rows]))


if __name__ == '__main__':
    main()
