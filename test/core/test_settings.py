# SPDX-License-Identifier: Apache-2.0
import math

import pytest

from rmuscle_core.errors import SettingsError
from rmuscle_core.settings import PROFILES, Settings, check, rows


def test_every_row_is_described_and_bounded():
    for row in rows():
        meta = row.metadata
        assert meta['description']
        assert meta['choices'] or (meta['low'] is not None and meta['high'] is not None), row.name
        assert check(row.name, row.default) == row.default


@pytest.mark.parametrize('name', PROFILES)
def test_a_profile_sets_both_ratios(name):
    settings = Settings().with_values(profile=name)
    assert (settings.token_ratio, settings.neuron_ratio) == PROFILES[name]
    assert settings.profile == name


def test_a_ratio_set_alone_makes_the_profile_custom_and_a_named_pair_gets_its_name_back():
    settings = Settings().with_values(token_ratio=0.123)
    assert settings.profile == 'custom'
    assert settings.neuron_ratio == Settings().neuron_ratio
    token_ratio, neuron_ratio = PROFILES['fast']
    assert settings.with_values(token_ratio=token_ratio, neuron_ratio=neuron_ratio).profile == 'fast'


def test_an_integer_serves_as_a_number():
    value = Settings().with_values(token_ratio=1).token_ratio
    assert value == 1.0 and isinstance(value, float)


@pytest.mark.parametrize(('name', 'value'), [
    ('token_ratio', 1.01), ('token_ratio', -0.1), ('token_ratio', math.nan), ('token_ratio', math.inf),
    ('token_ratio', 'half'), ('token_ratio', True), ('slots', 2.5), ('slots', 0), ('mode', 'both'),
    ('slots', math.nan), ('slots', math.inf), ('slots', 10**400), ('token_ratio', 10**400), ('mode', ['full']),
    ('profile', 'turbo'), ('speed', 1)])
def test_a_refusal_names_the_setting_and_the_value(name, value):
    with pytest.raises(SettingsError) as refusal:
        Settings().with_values(**{name: value})
    assert name in str(refusal.value) and (str(value) in str(refusal.value) or name == 'speed')


def test_a_refused_set_changes_nothing():
    before = Settings()
    with pytest.raises(SettingsError):
        before.with_values(token_ratio=0.2, neuron_ratio=7)
    assert before == Settings()
