"""What every order of training sequences shares: numbered sequences, epochs that are permutations, ignored targets."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from polarlm.data.order.permutation import Permutation, key
from polarlm.data.store.tokens import TokenStore
from polarlm.errors import UserError
from polarlm.ignored import IGNORED

_BLOCK = 4096  # permuted places are computed at most so many at a time; a memo, not a state


class Sequences(Protocol):
    """An endless, randomly addressable line of training sequences."""

    def rows(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """(tokens, targets, documents or None), each (len(numbers), context) int64, of the given sequence numbers."""
        ...

    def counted(self, numbers: np.ndarray) -> np.ndarray:
        """(len(numbers),) int64: how many targets of each sequence are not IGNORED, without reading its tokens."""
        ...


class EpochOrder:
    """Sequence number → (epoch, place): every epoch visits all places once, in an order of its own."""

    def __init__(self, per_epoch: int, seed: int):
        self.per_epoch, self.seed = per_epoch, seed
        self._size = min(max(8 * per_epoch, 64), _BLOCK)
        self._block: tuple[int, np.ndarray, np.ndarray] = (-1, np.empty(0, np.int64), np.empty(0, np.int64))

    def __call__(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Epochs and places of the given sequence numbers."""
        epochs, places = np.empty(len(numbers), np.int64), np.empty(len(numbers), np.int64)
        blocks = numbers // self._size
        for block in dict.fromkeys(blocks.tolist()):
            inside = blocks == block
            _, known_epochs, known_places = self._permuted(block)
            epochs[inside], places[inside] = (
                known[numbers[inside] % self._size] for known in (known_epochs, known_places)
            )
        return epochs, places

    def _permuted(self, block: int) -> tuple[int, np.ndarray, np.ndarray]:
        if self._block[0] != block:
            numbers = np.arange(block * self._size, (block + 1) * self._size)
            epochs, places = numbers // self.per_epoch, numbers % self.per_epoch
            for epoch in np.unique(epochs):
                inside = epochs == epoch
                places[inside] = Permutation(self.per_epoch, key(self.seed, int(epoch)))(places[inside])
            self._block = (block, epochs, places)
        return self._block


def mask_borders(targets: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Targets (B, T) with those ignored that belong to another document than their token; ids (B, T+1)."""
    return np.where(ids[:, 1:] == ids[:, :-1], targets, IGNORED)


def require_length(store: TokenStore, context: int) -> None:
    """Refuse a context that the split cannot fill even once."""
    if len(store) < context + 1:
        raise UserError(
            f"model.context={context} is longer than the {store.split} split ({len(store)} tokens; context + 1 are "
            f"needed). Set model.context to at most {max(len(store) - 1, 1)} or give more text."
        )
