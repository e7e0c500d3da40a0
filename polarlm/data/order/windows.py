"""Sequences cut from the concatenated documents: windows at a new phase and in a new order every epoch."""

from __future__ import annotations

import numpy as np

from polarlm.data.order.permutation import key
from polarlm.data.order.sequences import EpochOrder, mask_borders, require_length
from polarlm.data.store.tokens import TokenStore


class WindowSequences:
    """Windows of the concatenated documents; every epoch visits all of them, in a new order and at a new phase."""

    def __init__(self, store: TokenStore, context: int, seed: int, mask_documents: bool = False):
        require_length(store, context)
        self.store, self.context, self.seed, self.mask = store, context, seed, mask_documents
        self.order = EpochOrder((len(store) - 1) // context, seed)

    def begins(self, numbers: np.ndarray) -> np.ndarray:
        """First token of each sequence."""
        epochs, places = self.order(numbers)
        phases = {epoch: key(self.seed, epoch, 1) % self.context for epoch in dict.fromkeys(epochs.tolist())}
        shifts = np.array([phases[epoch] for epoch in epochs.tolist()])
        # The last window of a shifted epoch would run over the end: it is moved back instead.
        return np.minimum(places * self.context + shifts, len(self.store) - 1 - self.context)

    def counted(self, numbers: np.ndarray) -> np.ndarray:
        """Targets that count in each sequence: all, or all but those that begin another document."""
        if not self.mask:
            return np.full(len(numbers), self.context)
        begins = self.begins(numbers).tolist()
        return np.array([self.context - len(self.store.document_starts(b + 1, b + 1 + self.context)) for b in begins])

    def rows(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """(tokens, targets, documents or None) of the given sequence numbers."""
        begins = self.begins(numbers)
        window = self.store.windows(begins, self.context + 1)
        if not self.mask:
            return window[:, :-1], window[:, 1:], None
        ids = np.stack([self.store.document_ids(begin, self.context + 1) for begin in begins.tolist()])
        return window[:, :-1], mask_borders(window[:, 1:], ids), ids[:, :-1]
