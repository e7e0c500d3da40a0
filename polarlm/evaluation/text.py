"""A text to be read by a model: its tokens, where its documents begin, and how long it is in every unit."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from polarlm.data import Tokenizer, TokenStore
from polarlm.errors import UserError
from polarlm.evaluation.metrics import TextSize


@dataclass(frozen=True)
class Text:
    """Tokens (N,) and the places at which a document begins (the first is 0)."""

    tokens: np.ndarray
    starts: np.ndarray
    size: TextSize

    def document_of(self, places: np.ndarray) -> np.ndarray:
        """The number of the document that each place lies in."""
        return np.searchsorted(self.starts, places, side="right") - 1


def read_text(store: TokenStore, tokenizer: Tokenizer, tokens: int | None = None) -> Text:
    """The first `tokens` tokens of a split (all of them by default)."""
    count = min(tokens or len(store), len(store))
    if count < 2:
        raise UserError(f"The {store.split} split gives {count} tokens to judge on; at least 2 are needed.")
    starts = np.union1d([0], store.document_starts(0, count)).astype(np.int64)
    return Text(store[:count].astype(np.int64), starts, text_size(store, tokenizer, count))


_known: dict[tuple[str, int, int], TextSize] = {}  # by content, so that every validation of a run counts only once


def text_size(store: TokenStore, tokenizer: Tokenizer, tokens: int | None = None) -> TextSize:
    """The size of a split's first `tokens` tokens (all of them by default).

    The split's bytes are those of the text that was read. A tokenizer that loses something (unknown words, folded
    case) gives back other bytes than it got: bytes and characters of its decoded text are scaled by that ratio, which
    is 1 for byte, character and byte-level BPE tokenizers.
    """
    total = len(store)
    tokens = min(tokens or total, total)
    size_of_text = _known.get((store.fingerprint, store.bytes, tokens))
    if size_of_text is None:
        decoded = decoded_size(store, tokenizer, total)
        ratio = store.bytes / decoded.bytes if decoded.bytes and decoded.bytes != store.bytes else 1
        part = decoded if tokens == total else decoded_size(store, tokenizer, tokens)
        size = store.bytes if tokens == total else part.bytes * ratio
        size_of_text = TextSize(tokens, size, part.characters * ratio, part.words)
        _known[store.fingerprint, store.bytes, tokens] = size_of_text
    return size_of_text


def decoded_size(store: TokenStore, tokenizer: Tokenizer, tokens: int) -> TextSize:
    """What the first `tokens` tokens decode to, document by document."""
    borders = np.unique(np.concatenate([[0], store.document_starts(0, tokens), [tokens]])).tolist()
    size = characters = words = 0
    for begin, end in itertools.pairwise(borders):
        text = decoded_text(store[begin:end], tokenizer)
        size += len(text.encode())
        characters += len(text)
        words += len(text.split())
    return TextSize(tokens, size, characters, words)


def decoded_text(ids: np.ndarray, tokenizer: Tokenizer) -> str:
    """What ids decode to; end-of-text tokens stand for nothing."""
    return tokenizer.decode((ids if tokenizer.eos_id is None else ids[ids != tokenizer.eos_id]).tolist())
