"""A text to be read by a model: its tokens in order, where its documents begin, how long it is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from polarlm.data import Tokenizer, TokenStore
from polarlm.errors import UserError
from polarlm.evaluation.metrics import TextSize
from polarlm.evaluation.text_size import text_size


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
