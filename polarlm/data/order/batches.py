"""Which sequences are in which batch: a pure function of (seed, step, rank), the same for any number of workers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from polarlm.data.order.sequences import Sequences, mask_borders
from polarlm.data.store.tokens import TokenStore
from polarlm.errors import UserError
from polarlm.ignored import IGNORED

Batch = dict[str, Tensor]


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
    sequences: Sequences, micro_batch: int, rank: int = 0, world: int = 1, start: int = 0, accumulate: int = 1
) -> Iterator[Batch]:
    """Micro-batches from number `start` on: micro-batch i of rank r holds sequences [(i·world + r)·b, … + b).

    Micro-batches [s·accumulate, (s + 1)·accumulate) of all ranks are optimiser step s. Where documents are masked or
    packed they differ in how many targets count, so each carries `counted`: the step's counted targets divided by its
    micro-batches (over all ranks), a float. With Σ of the cross-entropy over a micro-batch's own targets,

        loss = Σ / batch["counted"]

    averaged over micro-batches and ranks (which is what accumulation and data-parallel training do to gradients) is
    the mean over every counted target of the step, however it is cut. Where every target counts it is the plain mean.
    """
    index = start
    step, counted = -1, torch.tensor(0.0)
    while True:
        if index // accumulate != step:
            step = index // accumulate
            size = accumulate * world * micro_batch
            total = int(sequences.counted(np.arange(step * size, (step + 1) * size)).sum())
            counted = torch.tensor(max(total, 1) / (accumulate * world), dtype=torch.float32)
        first = (index * world + rank) * micro_batch
        yield as_batch(*sequences.rows(np.arange(first, first + micro_batch))) | {"counted": counted}
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
                text, wanted, ids = self.window(window)
                tokens[row, : len(text)], targets[row, : len(text)] = text, wanted
                if documents is not None:
                    documents[row, : len(text)] = ids
            yield as_batch(tokens, targets, documents)

    def window(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(tokens, targets, documents) of one window, at most `context` long."""
        begin = number * self.context
        text = self.store[begin : min(begin + self.context + 1, self.length)].astype(np.int64)
        ids = self.store.document_ids(begin, len(text)) if self.mask else np.zeros(len(text), np.int64)
        return text[:-1], mask_borders(text[None, 1:], ids[None])[0], ids[:-1]
