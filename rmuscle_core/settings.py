# SPDX-License-Identifier: Apache-2.0
"""Every tunable of a policy call, declared once.

ROS parameters, command-line options, validation and docs/parameters.md are made from this table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any

from rmuscle_core.errors import SettingsError

NEXT_CALL, ON_CONFIGURE = 'next policy call', 'configure'
MODES = ('dense', 'context', 'action', 'full')
SOURCES = ('library', 'previous_call', 'none')
RESIDUALS = ('reference', 'anchored', 'none')
RTC = ('off', 'exp', 'linear')
WEIGHT_DTYPES = ('checkpoint', 'fp8')
# profile -> (token_ratio, neuron_ratio)
PROFILES = {'fast': (0.1, 0.35), 'default': (0.15, 0.5), 'slow': (0.25, 0.75)}


def setting(default: Any, description: str, *, low: float | None = None, high: float | None = None,
            choices: tuple[str, ...] = (), unit: str = '', effect: str = NEXT_CALL) -> Any:
    """One row of the table: a dataclass field whose metadata describes it."""
    return field(default=default, metadata={
        'description': description, 'low': low, 'high': high, 'choices': choices, 'unit': unit, 'effect': effect})


@dataclass(frozen=True)
class Settings:
    """An immutable snapshot; the policy takes a new one between calls."""

    profile: str = setting('default', 'named pair of token_ratio and neuron_ratio; "custom" keeps the two as set',
                           choices=(*PROFILES, 'custom'))
    token_ratio: float = setting(PROFILES['default'][0], 'share of visual tokens whose prefix FFN is recomputed',
                                 low=0.0, high=1.0)
    neuron_ratio: float = setting(PROFILES['default'][1], 'share of expert FFN neurons evaluated', low=0.0, high=1.0)
    mode: str = setting('full', 'which caches a call may use', choices=MODES)
    reference_source: str = setting('library', 'where references come from; each falls back to the next, then dense',
                                    choices=SOURCES)
    residual: str = setting('reference', 'what stands in for neurons not evaluated: their contribution in the '
                            'reference; the same, corrected by a dense first step of each group (anchored); nothing',
                            choices=RESIDUALS, effect=ON_CONFIGURE)
    min_similarity: float = setting(0.6, 'a reference less similar than this is not used', low=0.0, high=1.0)
    action_similarity: float = setting(0.85, 'a reference less similar than this serves the Context Cache only; the '
                                       'Action Cache is the less forgiving of the two', low=0.0, high=1.0)
    token_references: int = setting(3, 'references from which a token may reuse its output (the matched one, the call '
                                    'before, those of further episodes); each token takes the one it differs least '
                                    'from', low=1, high=8, effect=ON_CONFIGURE)
    history: int = setting(4, 'robot states compared in retrieval, newest included', low=1, high=32,
                           effect=ON_CONFIGURE)
    visual_weight: float = setting(0.5, 'weight of the visual part of the similarity; the state part has the rest',
                                   low=0.0, high=1.0)
    window: int = setting(1, 'calls before and after the expected one that are kept ready', low=0, high=10)
    window_episodes: int = setting(3, 'episodes whose windows are kept ready', low=1, high=64)
    budget: int = setting(6, 'references expanded at most while one chunk is executed', low=0, high=256)
    slots: int = setting(12, 'expanded references held on the device', low=1, high=256, effect=ON_CONFIGURE)
    step_tilt: float = setting(0.4, 'how much more of neuron_ratio late denoise steps have than early ones; 0: '
                               'equal', low=0.0, high=0.9)
    layer_tilt: float = setting(0.3, 'how much more of neuron_ratio early expert layers have than late ones; 0: '
                                'equal', low=0.0, high=0.9)
    mask_ratio: float = setting(0.75, 'share of neurons kept, ranked, in a library entry; upper limit of a cached '
                                'neuron_ratio', low=0.05, high=1.0, effect=ON_CONFIGURE)
    group_size: int = setting(5, 'consecutive denoise steps that share one neuron mask', low=1, high=64,
                              unit='steps', effect=ON_CONFIGURE)
    sketch_width: int = setting(0, 'width of the random projection by which tokens are compared; 0 compares them '
                                'whole', low=0, high=1024, effect=ON_CONFIGURE)
    denoise_steps: int = setting(0, 'Euler steps of a call; 0: as the checkpoint says. A library belongs to one number',
                                 low=0, high=100, unit='steps', effect=ON_CONFIGURE)
    weight_dtype: str = setting('checkpoint', 'how FFN weights are held: as the rest of the checkpoint, or in 8 bits '
                                '(e4m3)', choices=WEIGHT_DTYPES, effect=ON_CONFIGURE)
    rtc: str = setting('off', 'real-time chunking: a chunk is computed to continue the running one, whose hold on its '
                       'later steps fades exponentially or linearly', choices=RTC)
    rtc_horizon: int = setting(0, 'steps of a chunk on which the running one has a hold; 0: all it still has', low=0,
                               high=1000, unit='steps')
    rtc_weight: float = setting(10.0, 'greatest strength of that hold; more than the denoise steps is taken as that, '
                                'since it would overshoot', low=0.0, high=100.0)
    library_capacity: int = setting(0, 'what the library may take on disk; when a saved episode exceeds it, failed '
                                    'episodes are deleted first, then those that served longest ago; 0 keeps all',
                                    low=0, high=10**9, unit='MB')
    shadow_every: int = setting(5, 'every how many cached calls one is repeated dense in spare time and compared; 0: '
                                'none', low=0, high=10_000)
    shadow_limit: float = setting(0.05, 'mean difference of cached and dense actions, normalised, above which calls '
                                  'use a more careful profile', low=0.0, high=10.0)
    noise_seed: int = setting(0, 'seed of the initial noise, equal for every call so that references fit', low=0,
                              high=2**31 - 1, effect=ON_CONFIGURE)

    def with_values(self, **values: Any) -> Settings:
        """Return a checked copy; a profile sets the two ratios, a ratio set alone makes the profile "custom"."""
        checked = {name: check(name, value) for name, value in values.items()}
        profile = checked.get('profile', 'custom')
        if profile != 'custom':
            token_ratio, neuron_ratio = PROFILES[profile]
            checked = {'token_ratio': token_ratio, 'neuron_ratio': neuron_ratio, **checked}
        if {'token_ratio', 'neuron_ratio'} & set(checked):
            pair = tuple(checked.get(n, getattr(self, n)) for n in ('token_ratio', 'neuron_ratio'))
            named = next((name for name, ratios in PROFILES.items() if ratios == pair), 'custom')
            checked['profile'] = named
        return replace(self, **checked)


def rows() -> Iterator[Field]:
    """Yield the table's rows: ``name``, ``default``, ``type`` and ``metadata`` of each setting."""
    return iter(fields(Settings))


def check(name: str, value: Any) -> Any:
    """Return the value in its declared type.

    Raises SettingsError naming the setting, the value and what is allowed.
    """
    row = next((r for r in rows() if r.name == name), None)
    if row is None:
        raise SettingsError(f'there is no setting {name!r}; known are {", ".join(r.name for r in rows())}')
    meta, kind = row.metadata, type(row.default)
    if meta['choices']:
        if value not in meta['choices']:
            raise SettingsError(f'{name} must be one of {", ".join(meta["choices"])}, not {value!r}')
        return value
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if number and not meta['low'] <= value <= meta['high']:  # so is NaN, which no comparison accepts
        raise SettingsError(f'{name} must lie in [{meta["low"]}, {meta["high"]}], not {value!r}')
    if not number or value != kind(value):
        raise SettingsError(f'{name} must be {"an integer" if kind is int else "a number"} in '
                            f'[{meta["low"]}, {meta["high"]}], not {value!r}')
    return kind(value)
