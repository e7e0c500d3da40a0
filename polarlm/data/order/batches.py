"""Which tokens are in which batch: a pure function of (seed, sequence number), the same for any ranks and workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from polarlm.data.order.permutation import Permutation, key
from polarlm.data.store.tokens import TokenStore
from polarlm.errors import UserError

IGNORED = -100
Batch = dict[str, Tensor]
_BLOCK = 4096  # permuted places are computed at most so many at a time; a memo, not a state


class Sequences(Protocol):
    """An endless, randomly addressable line of training sequences."""

    def rows(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """(tokens, targets, documents or None), each (len(numbers), context) int64, of the given sequence numbers."""
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

    def rows(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        begins = self.begins(numbers)
        window = self.store.windows(begins, self.context + 1)
        if not self.mask:
            return window[:, :-1], window[:, 1:], None
        ids = np.stack([self.store.document_ids(begin, self.context + 1) for begin in begins.tolist()])
        return window[:, :-1], mask_borders(window[:, 1:], ids), ids[:, :-1]


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


def as_batch(tokens: np.ndarray, targets: np.ndarray, documents: np.ndarray | None) -> Batch:
    """Rows as the tensors a model takes."""
    batch = {
        "tokens": torch.from_numpy(np.ascontiguousarray(tokens)),
        "targets": torch.from_numpy(np.ascontiguousarray(targets)),
    }
    if documents is not None:
        batch["documents"] = torch.from_numpy(np.ascontiguousarray(documents))
    return batch


def train_batches(
    sequences: Sequences, micro_batch: int, rank: int = 0, world: int = 1, start: int = 0
) -> Iterator[Batch]:
    """Micro-batches from number `start` on: micro-batch i of rank r holds sequences [(i·world + r)·b, … + b)."""
    index = start
    while True:
        first = (index * world + rank) * micro_batch
        yield as_batch(*sequences.rows(np.arange(first, first + micro_batch)))
        index += 1


class EvalBatches:
    """A split once, in order, in windows that do not overlap: every token but the very first is a target once."""

    def __init__(
        self, store: TokenStore, context: int, micro_batch: int, rank: int = 0, world: int = 1,
        tokens: int | None = None, mask_documents: bool = False,
    ):  # fmt: skip
        if len(store) < 2:
            raise UserError(f"The {store.split} split has {len(store)} tokens; at least 2 are needed to judge on it.")
        self.store, self.context, self.micro_batch = store, context, micro_batch
        self.rank, self.world, self.mask = rank, world, mask_documents
        self.length = min(len(store), tokens) if tokens else len(store)
        self.windows = -(-(self.length - 1) // context)

    def __len__(self) -> int:
        # The same number on every rank: what is missing is filled with ignored rows.
        return -(-self.windows // (self.micro_batch * self.world))

    def __iter__(self) -> Iterator[Batch]:
        for number in range(len(self)):
            first = (number * self.world + self.rank) * self.micro_batch
            tokens = np.zeros((self.micro_batch, self.context), np.int64)
            targets = np.full((self.micro_batch, self.context), IGNORED, np.int64)
            documents = np.zeros((self.micro_batch, self.context), np.int64) if self.mask else None
            for row, window in enumerate(range(first, min(first + self.micro_batch, self.windows))):
                begin = window * self.context
                text = self.store[begin : min(begin + self.context + 1, self.length)].astype(np.int64)
                size = len(text) - 1
                tokens[row, :size], targets[row, :size] = text[:-1], text[1:]
                if documents is not None:
                    ids = self.store.document_ids(begin, size + 1)
                    documents[row, :size] = ids[:-1]
                    targets[row, :size] = mask_borders(targets[row : row + 1, :size], ids[None])[0]
            yield as_batch(tokens, targets, documents)
