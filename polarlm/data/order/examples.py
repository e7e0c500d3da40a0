"""Sequences that are one example of a task each, with the task's answers as targets."""

from __future__ import annotations

import numpy as np

from polarlm.data.order.batches import EvalBatches
from polarlm.data.order.sequences import EpochOrder
from polarlm.data.probes import PADDING, ProbeTask
from polarlm.data.store.tokens import TokenStore
from polarlm.errors import UserError
from polarlm.ignored import IGNORED


class ExampleSequences:
    """All examples of a split in every epoch, in an order of its own; padded where the context is longer."""

    def __init__(self, store: TokenStore, probe: ProbeTask, context: int, seed: int):
        if context < probe.length:
            raise UserError(
                f"model.context={context} is shorter than the examples, which have {probe.length} symbols; set "
                f"model.context={probe.length}."
            )
        self.store, self.probe, self.context = store, probe, context
        self.order = EpochOrder(len(store) // probe.length, seed)

    def counted(self, numbers: np.ndarray) -> np.ndarray:
        """Answers asked for in each sequence."""
        return np.full(len(numbers), self.probe.counted)

    def rows(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, None]:
        """(tokens, targets, None) of the given sequence numbers."""
        return *self.examples(self.order(numbers)[1]), None

    def examples(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, targets) of the examples at the given places of the split, padded to the context."""
        symbols = self.store.windows(places * self.probe.length, self.probe.length)
        answers, asked = self.probe.answers(symbols)
        room = ((0, 0), (0, self.context - self.probe.length))
        targets = np.where(asked, answers, IGNORED)
        return np.pad(symbols, room, constant_values=PADDING), np.pad(targets, room, constant_values=IGNORED)


class ExampleBatches(EvalBatches):
    """All examples of a split once, in order; of part of a split (`tokens`) those that begin within it."""

    def __init__(
        self, sequences: ExampleSequences, micro_batch: int, rank: int = 0, world: int = 1, tokens: int | None = None
    ):
        super().__init__(sequences.store, sequences.context, micro_batch, rank, world, tokens)
        self.sequences = sequences
        self.windows = -(-self.length // sequences.probe.length)

    def window(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(tokens, targets, documents) of one example."""
        tokens, targets = self.sequences.examples(np.array([number]))
        return tokens[0], targets[0], np.zeros(self.context, np.int64)


def eval_batches(
    store: TokenStore, probe: ProbeTask | None, context: int, micro_batch: int, rank: int = 0, world: int = 1,
    tokens: int | None = None, mask_documents: bool = False,
) -> EvalBatches:  # fmt: skip
    """A split read once for judging: its text in windows, or the examples of a task."""
    if probe is None:
        return EvalBatches(store, context, micro_batch, rank, world, tokens, mask_documents)
    return ExampleBatches(ExampleSequences(store, probe, context, seed=0), micro_batch, rank, world, tokens)
