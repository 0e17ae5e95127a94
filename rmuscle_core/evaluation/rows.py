# SPDX-License-Identifier: Apache-2.0
"""The rows of the closed-loop table: what is compared, declared once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rmuscle_core.engine.eager import EagerEngine
from rmuscle_core.evaluation import engines
from rmuscle_core.settings import PROFILES

BASELINE = 'dense'
EPISODES = 16  # of the library, where a row does not say otherwise
EVERYTHING = {'token_ratio': 1.0, 'neuron_ratio': 1.0}  # for engines that save elsewhere
EVEN = {'step_tilt': 0.0, 'layer_tilt': 0.0}


@dataclass(frozen=True)
class Row:
    """settings: as in docs/parameters.md, over the defaults. episodes: of the library. rank: how a reference's neurons
    are ordered, by their contribution or by how much it changes between the library's episodes.
    """

    name: str
    group: str
    settings: dict[str, Any] = field(default_factory=dict)
    engine: Callable[..., EagerEngine] = engines.MemoEngine
    episodes: int = EPISODES
    frozen: bool = False
    rank: str = 'contribution'
    note: str = ''


def _profiles() -> list[Row]:
    return [Row(profile, 'profiles', {'profile': profile}) for profile in PROFILES]


ROWS = [
    Row(BASELINE, 'profiles', {'mode': 'dense'}),
    *_profiles(),
    Row('context_only', 'caches', {'mode': 'context'}),
    Row('action_only', 'caches', {'mode': 'action'}),
    Row('previous_call', 'reference', {'reference_source': 'previous_call', 'min_similarity': 0.0,
                                       'action_similarity': 0.0},
        note='no library: the call before, however similar, at the ratios of default'),
    Row('any_similarity', 'reference', {'min_similarity': 0.0, 'action_similarity': 0.0},
        note='library references however similar'),
    Row('one_reference', 'reference', {'token_references': 1}, note='the paper: all tokens reuse one reference'),
    Row('two_references', 'reference', {'token_references': 2}),
    Row('one_reference_0.25', 'reference', {'token_references': 1, 'token_ratio': 0.25, **EVEN},
        note='the same with more tokens, neurons spread evenly'),
    Row('library_8', 'reference', episodes=8),
    Row('library_32', 'reference', episodes=32),
    Row('window_0', 'reference', {'window': 0, 'window_episodes': 1}),
    Row('window_2', 'reference', {'window': 2, 'window_episodes': 3, 'slots': 20, 'budget': 16}),
    *(Row(f'group_{size}', 'masks', {'group_size': size}) for size in (1, 2, 10)),
    Row('residual_none', 'masks', {'residual': 'none'}, note='the paper: what neurons left out contribute is lost'),
    Row('residual_anchored', 'masks', {'residual': 'anchored'}),
    Row('ranked_by_change', 'masks', rank='change'),
    Row('even_spread', 'masks', EVEN, note='the paper: as many neurons in every step and layer'),
    Row('dense_first_step', 'masks', engine=engines.DenseFirstStep, note='one of ten steps more'),
    Row('context_0.5', 'ratios', {'mode': 'context', 'token_ratio': 0.5}),
    Row('0.15/0.35', 'ratios', {'token_ratio': 0.15, 'neuron_ratio': 0.35}),
    Row('0.1/0.5', 'ratios', {'token_ratio': 0.1, 'neuron_ratio': 0.5}),
    Row('skip_steps', 'other methods', {'mode': 'dense'}, engines.SkipSteps, note='DP-Cache, our re-implementation'),
    Row('warm_start_0.5', 'other methods', EVERYTHING, engines.warm_start(0.5), note='NIRVANA, our re-implementation'),
    Row('replay', 'other methods', EVERYTHING, engines.Replay, note='RT-Cache, our re-implementation'),
    *(Row(f'steps_{steps}', 'other methods', {'mode': 'dense', 'denoise_steps': steps}) for steps in (5, 2, 1)),
    Row('context_steps_5', 'other methods', {'mode': 'context', 'denoise_steps': 5}, note='fewer steps beside a cache'),
    Row('default_steps_5', 'other methods', {'denoise_steps': 5}, note='fewer steps beside both caches'),
    Row('few_tokens', 'controls', {'mode': 'context', 'token_ratio': 0.02}),
    Row('one_neuron', 'controls', {'mode': 'action', 'neuron_ratio': 0.0}),
    Row('few_tokens_one_neuron', 'controls', {'token_ratio': 0.02, 'neuron_ratio': 0.0}),
    Row('random_tokens', 'controls', {'mode': 'context'}, engines.RandomTokens),
    Row('random_neurons', 'controls', {'mode': 'action'}, engines.RandomNeurons),
    Row('frozen_images', 'controls', {'mode': 'dense'}, frozen=True),
    Row('state_only', 'controls', {**EVERYTHING, 'visual_weight': 0.0}, engines.Replay,
        note="a library chunk chosen by the joints' history alone"),
]
QUICK = (BASELINE, 'default', 'previous_call')
BY_NAME = {row.name: row for row in ROWS}
