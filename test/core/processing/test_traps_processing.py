# SPDX-License-Identifier: Apache-2.0
"""Known ways in which a pi0 checkpoint runs and is wrong, by their numbers in docs/checkpoints.md: preprocessing's."""

from __future__ import annotations

import io
import json
import logging
import shutil
import socket
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rmuscle_core.errors import CheckpointError, ObservationError
from rmuscle_core.model import load_config
from rmuscle_core.observation import Observation
from rmuscle_core.processing import ByteTokenizer, Processor
from rmuscle_core.processing.processor import read_recipe
from rmuscle_core.processing.tokenizer import check_vocabulary, find_tokenizer

SOURCE = Path(__file__).parents[2] / 'data' / 'parity' / 'tiny_pi05_float32'
STILL = np.zeros(8, np.float32)
PRE, POST = 'policy_preprocessor.json', 'policy_postprocessor.json'


@pytest.fixture
def directory(tmp_path):
    copy = Path(shutil.copytree(SOURCE, tmp_path / 'checkpoint'))
    edit(copy / 'config.json', lambda content: content.update(tokenizer_max_length=120))
    edit(copy / PRE, lambda content: step(content, 'tokenizer_processor').update(max_length=120))
    (copy / 'rmuscle.yaml').write_text('tokenizer: byte')
    return copy


def edit(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def step(content, name):
    return next(s['config'] for s in content['steps'] if s['registry_name'] == name)


def without(content, name):
    content['steps'] = [s for s in content['steps'] if s['registry_name'] != name]


def processor(directory):
    return Processor.from_checkpoint(directory, replace(load_config(directory), vocab=ByteTokenizer.vocab))


def looks(names=('base_0_rgb',), state=STILL, prompt='stack'):
    return Observation({name: np.zeros((48, 64, 3), np.uint8) for name in names}, state, prompt)


def test_f05_i02_files_that_look_like_lerobot_0_4_are_warned_about_until_the_user_says(directory, caplog):
    def lines():
        caplog.clear()
        with caplog.at_level(logging.INFO, 'rmuscle_core'):
            processor(directory).announce()
        return [r.message for r in caplog.records if r.levelno == logging.WARNING]

    assert lines() == []
    edit(directory / PRE, lambda content: without(content, 'relative_actions_processor'))
    edit(directory / POST, lambda content: without(content, 'absolute_actions_processor'))
    (warning,) = lines()
    assert 'compat: lerobot04' in warning
    for compat, bar in (('lerobot04', -3), ('lerobot05', -1)):
        (directory / 'rmuscle.yaml').write_text(f'tokenizer: byte\ncompat: {compat}')
        assert lines() == []
        assert float(processor(directory).encode(looks()).images.min()) == bar
    (directory / 'rmuscle.yaml').write_text('compat: lerobot06')
    with pytest.raises(CheckpointError, match='lerobot05, lerobot04'):
        processor(directory)


def test_i10_rename_map_is_obeyed_and_two_pictures_for_one_camera_are_refused(directory):
    edit(directory / PRE, lambda content: step(content, 'rename_observations_processor').update(
        rename_map={'observation.images.top': 'observation.images.base_0_rgb',
                    'observation.images.third': 'observation.images.empty_camera_0'}))
    made = processor(directory)
    assert made.encode(looks(('top',))).views == ('base_0_rgb',)
    assert made.report()['cameras renamed'] == 'top as base_0_rgb'
    with pytest.raises(ObservationError, match="two pictures are meant for camera 'base_0_rgb'"):
        made.encode(looks(('top', 'base_0_rgb')))
    with pytest.raises(ObservationError, match="camera 'third'"):
        made.encode(looks(('third',)))
    edit(directory / PRE, lambda content: step(content, 'rename_observations_processor').update(
        rename_map={'observation.images.top': 'observation.images.head'}))
    with pytest.raises(CheckpointError, match='renames top to head'):
        processor(directory)


def drop_statistic(name):
    def change(directory):
        path = next(directory.glob(f'policy_*{"un" if name.startswith("action") else "_"}normalizer*'))
        save_file({key: value for key, value in load_file(path).items() if key != name}, path)
    return change


@pytest.mark.parametrize('damage', [
    lambda d: (d / PRE).unlink(), lambda d: (d / POST).unlink(),
    lambda d: next(d.glob('policy_preprocessor_step_*')).unlink(),
    lambda d: next(d.glob('policy_postprocessor_step_*')).unlink(),
    lambda d: edit(d / PRE, lambda content: without(content, 'normalizer_processor')),
    lambda d: edit(d / POST, lambda content: without(content, 'unnormalizer_processor')),
    drop_statistic('observation.state.q01'), drop_statistic('action.q99')])
def test_i11_normalisation_is_never_skipped(directory, damage):
    processor(directory)
    damage(directory)
    with pytest.raises(CheckpointError):
        processor(directory)


def test_i11_the_processor_files_decide_how_not_config_json(directory):
    edit(directory / 'config.json', lambda content: content['normalization_mapping'].update(STATE='IDENTITY'))
    edit(directory / POST, lambda content: step(content, 'unnormalizer_processor')['norm_map'].update(
        ACTION='MEAN_STD'))
    made = processor(directory)
    assert (made.state.mode, made.actions.mode) == ('QUANTILES', 'MEAN_STD')


@pytest.mark.parametrize(('config', 'settings'), [(True, False), (False, True)])
def test_i09_files_that_disagree_about_relative_actions_are_refused(directory, config, settings):
    edit(directory / 'config.json', lambda content: content.update(use_relative_actions=config))
    edit(directory / PRE, lambda content: step(content, 'relative_actions_processor').update(enabled=settings))
    edit(directory / POST, lambda content: step(content, 'absolute_actions_processor').update(enabled=settings))
    with pytest.raises(CheckpointError, match='use_relative_actions'):
        processor(directory)


def test_i09_relative_actions_of_another_kind_are_refused_by_name(directory):
    edit(directory / 'config.json', lambda content: content.pop('use_relative_actions'))
    edit(directory / PRE, lambda content: step(content, 'relative_actions_processor').update(
        enabled=True, pose_representation='se3_6d'))
    edit(directory / POST, lambda content: step(content, 'absolute_actions_processor').update(enabled=True))
    with pytest.raises(CheckpointError, match='pose_representation'):
        processor(directory)


def test_i12_a_joint_that_hardly_moved_is_told_and_its_noise_bounded(directory):
    path = next(directory.glob('policy_preprocessor_step_*'))
    statistics = load_file(path)
    statistics['observation.state.q99'][2] = statistics['observation.state.q01'][2] + 1e-6
    save_file(statistics, path)
    made = processor(directory)
    assert 'state dimension 2 hardly moves' in made.doubts()['state 2 still']
    state = made.neutral_state()
    state[2] += 1e-2
    assert np.abs(made.encode(looks(state=state)).state_normalized).max() <= 10


def test_i13_everything_works_without_a_network(directory, monkeypatch, tmp_path):
    def refuse(*_, **__):
        raise AssertionError('the network was asked')
    monkeypatch.setattr(socket, 'create_connection', refuse)
    monkeypatch.setattr(socket.socket, 'connect', refuse)
    monkeypatch.setenv('HOME', str(tmp_path))
    assert processor(directory).encode(looks()).views == ('base_0_rgb',)
    (directory / 'rmuscle.yaml').unlink()
    with pytest.raises(CheckpointError, match=r'hf download google/paligemma.*paligemma_tokenizer\.model'):
        processor(directory)


def test_i13_tokenizers_are_looked_for_in_the_documented_order(directory, monkeypatch, tmp_path):
    pytest.importorskip('tokenizers')
    hub = tmp_path / 'hub/models--google--paligemma-3b-pt-224'
    for folder in (hub / 'snapshots/abc', hub / 'refs', tmp_path / '.cache/openpi/big_vision'):
        folder.mkdir(parents=True)
    monkeypatch.setenv('HOME', str(tmp_path))
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_CACHE', str(tmp_path / 'hub'))

    train_tokenizer(tmp_path / '.cache/openpi/big_vision/paligemma_tokenizer.model')
    openpi = find_tokenizer(directory)
    assert openpi.name.startswith('paligemma_tokenizer.model')
    newline = openpi.encode('\n')
    assert openpi.encode('pick up\n')[-1] == newline[1] and openpi.decode(openpi.encode('pick up')) == 'pick up'
    (hub / 'refs/main').write_text('abc')
    write_tokenizer(hub / 'snapshots/abc/tokenizer.json', 1)
    assert find_tokenizer(directory).vocab == 100 + 1
    write_tokenizer(directory / 'tokenizer.json', 2)
    assert find_tokenizer(directory).vocab == 100 + 2
    write_tokenizer(tmp_path / 'mine.json', 3)
    assert find_tokenizer(directory, tmp_path / 'mine.json').vocab == 100 + 3
    (directory / 'rmuscle.yaml').write_text('tokenizer: ../mine.json')
    assert processor(directory).tokenizer.vocab == 100 + 3


def train_tokenizer(path):
    """A sentencepiece model with PaliGemma's marks, of a few pieces."""
    spm = pytest.importorskip('sentencepiece')
    made = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(['pick up the cup', 'put down the cap']), model_writer=made, model_type='char',
        vocab_size=24, pad_id=0, eos_id=1, bos_id=2, unk_id=3, user_defined_symbols=['\n'], add_dummy_prefix=False,
        normalization_rule_name='identity', remove_extra_whitespaces=False, hard_vocab_limit=False, minloglevel=2)
    path.write_bytes(made.getvalue())


def write_tokenizer(path, further, pieces=('<pad>', '<eos>', '<bos>')):
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    listed = [*pieces, '\n', *map(chr, range(32, 127)), '<a>', *(f'<extra{i}>' for i in range(further))]
    Tokenizer(BPE({piece: i for i, piece in enumerate(listed)}, [])).save(str(path))


@pytest.mark.parametrize('pieces', [('<pad>', '<bos>', '<eos>'), ('<s>', '<eos>', '<bos>'), ('<pad>', '<eos>', '<s>')])
def test_i13_a_tokenizer_with_other_marks_is_refused(tmp_path, pieces):
    pytest.importorskip('tokenizers')
    write_tokenizer(tmp_path / 'tokenizer.json', 0, pieces)
    with pytest.raises(CheckpointError, match='<pad> and <bos> as ids 0 and 2'):
        find_tokenizer(tmp_path)


@pytest.mark.parametrize(('vocab', 'embedded', 'fits'), [
    (257_152, 257_152, True), (257_153, 257_152, True), (256_000, 257_152, True), (257_154, 257_152, False),
    (32_000, 257_152, False), (520, 520, True), (522, 520, False)])
def test_i13_the_vocabulary_has_to_be_the_checkpoints(vocab, embedded, fits):
    tokenizer = ByteTokenizer()
    tokenizer.vocab = vocab
    if fits:
        check_vocabulary(tokenizer, embedded, SOURCE)
    else:
        with pytest.raises(CheckpointError, match=f'embeds {embedded}'):
            check_vocabulary(tokenizer, embedded, SOURCE)


def test_i13_a_token_that_is_not_embedded_is_refused(directory):
    made = processor(directory)
    made.tokenizer.encode = lambda text: [2, made.config.vocab]
    with pytest.raises(ObservationError, match=r'does not embed.*<image>'):
        made.encode(looks())


def test_i17_every_choice_is_reported(directory, caplog):
    made = processor(directory)
    with caplog.at_level(logging.INFO, 'rmuscle_core'):
        made.announce()
    for name in ('rules', 'images', 'prompt', 'tokenizer', 'state normalization', 'action normalization',
                 'relative actions'):
        assert sum(f'preprocessing, {name}: ' in r.message for r in caplog.records) == 1
    assert read_recipe(directory, made.config).report().items() <= made.report().items()
