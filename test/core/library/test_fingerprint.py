# SPDX-License-Identifier: Apache-2.0
"""Equal weights have equal digests however they are stored; one ulp or another rule makes another fingerprint."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from rmuscle_core.errors import CheckpointError, LibraryError
from rmuscle_core.library import EpisodeLibrary, fingerprint
from rmuscle_core.library.fingerprint import differences, weights_digest
from rmuscle_core.model import ModelConfig, TransformerConfig, VisionConfig
from rmuscle_core.processing import ByteTokenizer, Normalizer, Processor
from rmuscle_core.processing.lerobot import COMPAT
from rmuscle_core.processing.prompt import PromptRule
from rmuscle_core.processing.recipe import Recipe
from rmuscle_core.processing.steps import Normalization, Padding
from rmuscle_core.processing.views import Views

WEIGHTS = {f'layer.{i}.weight': np.random.default_rng(i).normal(size=(8, 4)).astype(np.float32) for i in range(5)}
CONFIG = ModelConfig('pi05', VisionConfig(image_size=56, width=32, heads=2), TransformerConfig(8, 2, 16, head_dim=4),
                     TransformerConfig(8, 2, 16, head_dim=4), vocab=520, cameras=('top', 'wrist'), state_dim=3,
                     action_dim=3)


def model(**changes):
    return SimpleNamespace(config=replace(CONFIG, **changes))  # all that a fingerprint asks of a model


def processor(config=CONFIG, low=0.0, compat='lerobot05'):
    scale = Normalizer('QUANTILES', np.full(3, low, np.float32), np.ones(3, np.float32))
    recipe = Recipe(Views(config.cameras, 56, COMPAT[compat][0]), (Normalization(scale, scale), Padding(32, 3)),
                    PromptRule('pi05', 200), compat)
    return Processor(config, recipe, ByteTokenizer())


@pytest.fixture
def checkpoint(tmp_path):
    save_file(WEIGHTS, tmp_path / 'model.safetensors')
    return tmp_path


def test_a_file_saved_again_has_the_same_digest(checkpoint):
    save_file(dict(reversed(WEIGHTS.items())), checkpoint / 'again.safetensors', metadata={'note': 'again'})
    assert weights_digest(checkpoint / 'again.safetensors') == weights_digest(checkpoint / 'model.safetensors')


def test_weights_in_several_files_have_the_same_digest(checkpoint):
    parts = [dict(list(WEIGHTS.items())[part::2]) for part in (1, 0)]
    for number, part in enumerate(parts):
        save_file(part, checkpoint / f'{number}.safetensors')
    spread = weights_digest(*(checkpoint / f'{number}.safetensors' for number in (0, 1)))
    assert spread == weights_digest(checkpoint / 'model.safetensors')


def change_one_ulp(weights):
    weights['layer.3.weight'][2, 1] = np.nextafter(weights['layer.3.weight'][2, 1], np.float32(9))


def exchange(weights):
    weights['layer.0.weight'], weights['layer.1.weight'] = weights['layer.1.weight'], weights['layer.0.weight']


def reshape(weights):
    weights['layer.0.weight'] = weights['layer.0.weight'].reshape(4, 8)


def drop(weights):
    del weights['layer.4.weight']


@pytest.mark.parametrize('change', [change_one_ulp, exchange, reshape, drop])
def test_other_weights_have_another_digest(checkpoint, change):
    weights = {name: value.copy() for name, value in WEIGHTS.items()}
    change(weights)
    save_file(weights, checkpoint / 'other.safetensors')
    assert weights_digest(checkpoint / 'other.safetensors') != weights_digest(checkpoint / 'model.safetensors')


def one_ulp(checkpoint):
    weights = {name: value.copy() for name, value in WEIGHTS.items()}
    change_one_ulp(weights)
    save_file(weights, checkpoint / 'model.safetensors')
    return fingerprint(checkpoint, model(), processor(), joints='a b')


CHANGES = [
    ('weights', one_ulp),
    ('images', lambda c: fingerprint(c, model(), processor(compat='lerobot04'))),
    ('state normalization', lambda c: fingerprint(c, model(), processor(low=0.1))),
    ('cameras', lambda c: fingerprint(c, model(cameras=('wrist', 'top')), processor())),
    ('numerics', lambda c: fingerprint(c, model(dtype='bfloat16'), processor())),
    ('model', lambda c: fingerprint(c, model(steps=5), processor())),
    ('joints', lambda c: fingerprint(c, model(), processor(), joints='b a')),
]


@pytest.mark.parametrize('field, changed', CHANGES)
def test_v30_a_library_made_otherwise_is_refused_naming_the_field(checkpoint, tmp_path, field, changed):
    library = EpisodeLibrary.create(tmp_path / 'library', fingerprint(checkpoint, model(), processor(), joints='a b'))
    EpisodeLibrary.open(library.path, fingerprint(checkpoint, model(), processor(), joints='a b'))
    with pytest.raises(LibraryError, match=f'another {field} '):
        EpisodeLibrary.open(library.path, changed(checkpoint))


def test_v30_the_same_weights_under_another_name_and_order_are_accepted(checkpoint, tmp_path):
    library = EpisodeLibrary.create(tmp_path / 'library', fingerprint(checkpoint, model(), processor(), joints='a b'))
    elsewhere = tmp_path / 'copied'
    elsewhere.mkdir()
    save_file(dict(reversed(WEIGHTS.items())), elsewhere / 'model.safetensors', metadata={'note': 'again'})
    assert EpisodeLibrary.open(library.path, fingerprint(elsewhere, model(), processor(), joints='a b')).problems == []


@pytest.mark.parametrize('field', ['weights', 'images', 'numerics', 'tokenizer'])
def test_v30_a_library_that_does_not_say_what_it_was_made_with_is_refused(checkpoint, tmp_path, field):
    present = fingerprint(checkpoint, model(), processor())
    stored = {name: text for name, text in present.items() if name != field}
    assert [phrase.split(' (')[0] for phrase in differences(stored, present)] == [field]


@pytest.mark.parametrize('field, changed', CHANGES)
def test_each_difference_is_named(checkpoint, field, changed):
    stored = fingerprint(checkpoint, model(), processor(), joints='a b')
    assert differences(stored, fingerprint(checkpoint, model(), processor(), joints='a b')) == []
    assert field in [phrase.split(' (')[0] for phrase in differences(stored, changed(checkpoint))]


CUT_OFF = b'{"w":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}'


@pytest.mark.parametrize('content', [b'', b'\xff' * 8, (2).to_bytes(8, 'little') + b'{',
                                     len(CUT_OFF).to_bytes(8, 'little') + CUT_OFF])
def test_a_damaged_file_is_refused(tmp_path, content):
    path = tmp_path / 'model.safetensors'
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r'model\.safetensors'):
        weights_digest(path)
