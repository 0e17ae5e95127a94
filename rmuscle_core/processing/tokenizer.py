# SPDX-License-Identifier: Apache-2.0
"""Text to token ids: a byte tokenizer for small checkpoints, or the PaliGemma tokenizer from local files."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Protocol

from rmuscle_core.errors import CheckpointError, reason

# the state list of a pi0.5 prompt, which is always the end of the text
_STATE_LIST = re.compile(r'(?<=, State:)(?: -?\d+)+(?=;\nAction: \Z)')
_NUMBER, _BYTE, _BOS = 261, 4, 2
GEMMA, PALIGEMMA = 256_000, 257_152  # ids of the base vocabulary; with places and segments, as checkpoints embed them


class Tokenizer(Protocol):
    """name: what the start-up report shows; vocab: ids are below it; encode puts <bos> first and no <eos> last."""

    name: str
    vocab: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


class ByteTokenizer:
    """Bytes of UTF-8 as tokens, used by checkpoints whose config.json says ``"rmuscle_tokenizer": "byte"``.

    Ids: 0 pad, 1 eos, 2 bos, 3 unk (never produced), 4 + b for byte b. In the state list of a pi0.5 prompt (the
    numbers between ", State:" and the final ";\\nAction: ") each number v in -1..255, written without leading zeros,
    is one token 261 + v together with the space before it. 517..519 are unused; the vocabulary has 520 ids.
    """

    name, vocab = 'byte', 520

    def encode(self, text: str) -> list[int]:
        """Return [bos, ...]; every text can be encoded and `decode` gives it back."""
        state = _STATE_LIST.search(text)
        if state is None:
            return [_BOS, *_to_bytes(text)]
        ids = [_BOS, *_to_bytes(text[:state.start()])]
        for word in state.group().split():
            value = int(word)
            short = -1 <= value <= 255 and str(value) == word
            ids += [_NUMBER + value] if short else _to_bytes(f' {word}')
        return ids + _to_bytes(text[state.end():])

    def decode(self, ids: list[int]) -> str:
        """Text of the ids; pad, eos, bos, unk and unused ids give nothing."""
        raw = b''
        for i in ids:
            if _BYTE <= i < _BYTE + 256:
                raw += bytes([i - _BYTE])
            elif _NUMBER - 1 <= i <= _NUMBER + 255:
                raw += f' {i - _NUMBER}'.encode()
        return raw.decode('utf-8', errors='replace')


def _to_bytes(text: str) -> list[int]:
    return [_BYTE + b for b in text.encode('utf-8', errors='replace')]


class FileTokenizer:
    """PaliGemma's tokenizer from ``tokenizer.json`` (package tokenizers) or ``tokenizer.model`` (sentencepiece)."""

    def __init__(self, path: Path) -> None:
        """Load the file; raises CheckpointError when it is unreadable or not a tokenizer of the PaliGemma kind."""
        self.name = f'{path.name} {hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()}'
        try:
            marks = self._load(path)
        except ModuleNotFoundError as error:
            raise CheckpointError(f'{path} needs the Python package {error.name}; install it with: pip install '
                                  f'{error.name}, or set tokenizer_path to the other kind of file') from error
        except Exception as error:  # both packages raise bare Exception types of their own on a bad file
            raise CheckpointError(f'{path} is not a readable tokenizer ({reason(error)}); '
                                  'copy it again from google/paligemma-3b-pt-224') from error
        ids = self.encode('\n')
        if len(ids) != 2 or marks != (0, _BOS):
            raise CheckpointError(f'{path}: expected <pad> and <bos> as ids 0 and 2 and a newline as one token, found '
                                  f'ids {marks[0]} and {marks[1]} and {len(ids) - 1} tokens; use the tokenizer of '
                                  'google/paligemma-3b-pt-224')

    def _load(self, path: Path) -> tuple[int | None, int | None]:
        """Return the ids of <pad> and <bos>."""
        if path.suffix == '.json':
            from tokenizers import Tokenizer as Fast

            fast = Fast.from_file(str(path))
            fast.no_padding()
            fast.no_truncation()
            self._pieces = lambda text: fast.encode(text, add_special_tokens=False).ids
            self.decode, self.vocab = fast.decode, fast.get_vocab_size()
            return fast.token_to_id('<pad>'), fast.token_to_id('<bos>')
        from sentencepiece import SentencePieceProcessor

        pieces = SentencePieceProcessor(model_file=str(path))
        self._pieces, self.decode, self.vocab = pieces.encode, pieces.decode, pieces.vocab_size()
        return pieces.pad_id(), pieces.bos_id()

    def encode(self, text: str) -> list[int]:
        """Return [bos, ...] without eos."""
        return [_BOS, *self._pieces(text)]


def check_vocabulary(tokenizer: Tokenizer, embedded: int, checkpoint: Path) -> None:
    """Raise CheckpointError when a tokenizer cannot be that of a checkpoint that embeds so many ids."""
    # transformers adds <image> behind the PaliGemma vocabulary; no text of a prompt becomes that id
    if tokenizer.vocab > embedded + 1 or (embedded >= PALIGEMMA and tokenizer.vocab < GEMMA):
        raise CheckpointError(f'tokenizer {tokenizer.name} has {tokenizer.vocab} ids, the checkpoint {checkpoint} '
                              f'embeds {embedded}; use the tokenizer it was trained with')


def find_tokenizer(checkpoint: Path, tokenizer_path: str | Path | None = None,
                   name: str = 'google/paligemma-3b-pt-224') -> FileTokenizer:
    """First local tokenizer of: ``tokenizer_path`` (file or folder), the checkpoint's folder, caches; no download.

    Raises CheckpointError naming the two ways to get one when none is found.
    """
    for place in [Path(tokenizer_path)] if tokenizer_path else [checkpoint, *_cached(name)]:
        for path in (place, place / 'tokenizer.json', place / 'tokenizer.model'):
            if path.is_file():
                return FileTokenizer(path)
    raise CheckpointError(
        f'no tokenizer found in {tokenizer_path or f"{checkpoint} or the local caches"}; get it with '
        f'"hf auth login && hf download {name} tokenizer.json" (after accepting the licence) or copy '
        'gs://big_vision/paligemma_tokenizer.model, and set tokenizer_path to the file')


def _cached(name: str) -> list[Path]:
    places = [Path.home() / '.cache/openpi/big_vision/paligemma_tokenizer.model']
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return places
    hits = (try_to_load_from_cache(name, file) for file in ('tokenizer.json', 'tokenizer.model'))
    return [Path(hit) for hit in hits if isinstance(hit, str)] + places
