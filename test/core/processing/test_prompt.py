# SPDX-License-Identifier: Apache-2.0
"""The prompt keeps its state and "Action: " whatever the task text; the byte tokenizer loses nothing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmuscle_core.errors import CheckpointError, ObservationError
from rmuscle_core.processing.prompt import prompt_ids, prompt_parts, state_bins
from rmuscle_core.processing.tokenizer import ByteTokenizer, FileTokenizer, find_tokenizer

STATE = np.array([-1.2, -1.0, 0.0, 0.999, 7.0], np.float32)
BYTES = ByteTokenizer()


def test_bins_run_from_minus_one_to_255():
    assert state_bins(STATE).tolist() == [-1, 0, 128, 255, 255]
    inside = np.linspace(-1, 0.999, 1000)
    centres = (state_bins(inside) + 0.5) / 128 - 1
    assert np.abs(centres - inside).max() <= 1 / 256 + 1e-9  # half a bin


def test_pi05_text():
    head, tail = prompt_parts('pi05', ' pick_up the\ncube ', STATE)
    assert head + tail == 'Task: pick up the cube, State: -1 0 128 255 255;\nAction: '


@pytest.mark.parametrize('task', ['stack', 'stack\n'])
def test_pi0_text_ends_with_one_newline(task):
    assert ''.join(prompt_parts('pi0', task, STATE)) == 'stack\n'


def test_each_number_of_the_state_is_one_token():
    ids = BYTES.encode(', State: -1 0 255;\nAction: ')
    assert ids[0] == 2 and ids[9:12] == [260, 261, 516]
    assert len(ids) == 1 + len(', State:') + 3 + len(';\nAction: ')


def test_numbers_elsewhere_are_bytes():
    assert BYTES.encode('move 12 up') == [2, *(4 + b for b in b'move 12 up')]


@given(st.text(), st.lists(st.integers(-400, 400), max_size=6))
def test_bytes_round_trip(task, values):
    text = f'{task}, State:{"".join(f" {v}" for v in values)};\nAction: '
    ids = BYTES.encode(text)
    assert BYTES.decode(ids) == text.encode('utf-8', 'replace').decode()
    assert all(0 <= i < BYTES.vocab for i in ids)


def test_v22_a_long_task_is_cut_and_the_state_kept():
    ids, uncut = prompt_ids('pi05', 'cube ' * 1000, STATE, BYTES, 200)
    assert len(ids) == 200 and uncut > 5000
    text = BYTES.decode(ids)
    assert text.startswith('Task: cube cube') and text.endswith(', State: -1 0 128 255 255;\nAction: ')


def test_v22_a_state_that_alone_is_too_long_is_refused():
    with pytest.raises(ObservationError, match='20'):
        prompt_ids('pi05', 'x', STATE, BYTES, 20)


def _word_tokenizer(path, start='<bos>'):
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    letters = ['<pad>', '<eos>', start, '\n', *map(chr, range(32, 127))]
    Tokenizer(BPE({piece: i for i, piece in enumerate(letters)}, [])).save(str(path))


def test_tokenizer_from_a_file(tmp_path):
    pytest.importorskip('tokenizers')
    _word_tokenizer(tmp_path / 'tokenizer.json')
    tokenizer = find_tokenizer(tmp_path)
    assert tokenizer.vocab == 99 and tokenizer.encode('a\n') == [2, 69, 3]
    ids, uncut = prompt_ids('pi05', 'cube ' * 1000, STATE, tokenizer, 100)
    assert len(ids) == 100 < uncut and ids[-2:] == tokenizer.encode(': ')[1:]


def test_a_foreign_or_broken_tokenizer_is_refused(tmp_path):
    pytest.importorskip('tokenizers')
    for name, content in (('tokenizer.json', '{'), ('tokenizer.model', 'not a model')):
        path = tmp_path / name
        path.write_text(content)
        with pytest.raises(CheckpointError, match=name):
            FileTokenizer(path)


def test_i13_no_tokenizer_names_both_ways_to_get_one(tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', str(tmp_path))
    with pytest.raises(CheckpointError) as refusal:
        find_tokenizer(tmp_path, tmp_path / 'absent')
    assert 'hf download' in str(refusal.value) and 'paligemma_tokenizer.model' in str(refusal.value)
