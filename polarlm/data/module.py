"""The Lightning data module: prepared corpus in, batches out, each ready before the step that needs it."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor

from polarlm.data.config import PACKINGS
from polarlm.data.corpus import Corpus
from polarlm.data.order import MixtureSequences, Sequences, WindowSequences, mask_borders
from polarlm.data.probes import ExampleSequences, ProbeTask
from polarlm.data.store import TokenStore
from polarlm.errors import UserError
from polarlm.ignored import IGNORED

_ENDLESS = 10**9  # Lightning pre-fetches from loaders without a length and then loses a batch on resume
_AHEAD = 2
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


class Prefetched:
    """Batches made by a background thread, a few ahead; every iteration begins anew with `make`."""

    def __init__(self, make: Callable[[], Iterable[Batch]], length: int = _ENDLESS):
        self._make, self._length = make, length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        ready: queue.Queue[Batch | BaseException | None] = queue.Queue(_AHEAD)
        stopped = threading.Event()
        pin = torch.cuda.is_available()

        def put(item: Batch | BaseException | None) -> bool:
            while not stopped.is_set():
                try:
                    ready.put(item, timeout=0.1)
                    return True
                except queue.Full:
                    continue
            return False

        def read() -> None:
            try:
                for batch in self._make():
                    if not put({name: tensor.pin_memory() for name, tensor in batch.items()} if pin else batch):
                        return
                put(None)
            except BaseException as error:
                put(error)

        thread = threading.Thread(target=read, name="polarlm-batches", daemon=True)
        thread.start()
        try:
            while (item := ready.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            stopped.set()
            thread.join()


class EvalLoader(Prefetched):
    """Every target of a split once, and what a metric needs to know about the text: split, store, tokenizer, length."""

    def __init__(self, batches: EvalBatches, corpus: Corpus, tokens: int | None):
        super().__init__(lambda: batches, len(batches))
        self.split, self.store, self.tokenizer, self.tokens = (
            batches.store.split,
            batches.store,
            corpus.tokenizer,
            tokens,
        )


class LMDataModule(pl.LightningDataModule):
    """Batches of a corpus; training continues at the trainer's step, so that resuming needs no saved data state."""

    def __init__(
        self, corpus: Corpus, *, context: int, micro_batch: int, seed: int, mask_documents: bool = False,
        packing: str = "stream", eval_tokens: int | None = None,
    ):  # fmt: skip
        super().__init__()
        self.corpus, self.context, self.micro_batch, self.seed = corpus, context, micro_batch, seed
        self.mask_documents, self.packing, self.eval_tokens = mask_documents, packing, eval_tokens
        # (after step, batches left out): where training went back and on with other batches (training/incidents.py).
        self.detours: list[tuple[int, int]] = []
        if packing not in PACKINGS:
            raise UserError(f"data.packing={packing!r} is not allowed; choose one of {', '.join(PACKINGS)}.")
        # Said at once, not after the model has been built: these raise UserError for data that is too short.
        self.sequences()
        for split in ("val", "test"):
            if split in corpus.splits:
                self._eval_batches(split)

    def sequences(self) -> Sequences:
        """The endless line of training sequences, addressed by number."""
        if not self.corpus.parts:
            return self._sequences_of(self.corpus)
        parts = [self._sequences_of(part) for part, _ in self.corpus.parts]
        return MixtureSequences(parts, [weight for _, weight in self.corpus.parts], self.seed)

    def _sequences_of(self, corpus: Corpus) -> Sequences:
        if corpus.stream is not None:
            from polarlm.data.streaming import StreamingSequences

            if self.packing != "stream":
                raise UserError(f"data.packing={self.packing} needs a prepared corpus; set data.streaming=false.")
            index = corpus.folder / "stream.jsonl"
            return StreamingSequences(*corpus.stream, corpus.tokenizer, self.context, index, self.mask_documents)
        store = corpus.store("train")
        if corpus.probe is not None:
            return ExampleSequences(store, corpus.probe, self.context, self.seed)
        if self.packing == "stream":
            return WindowSequences(store, self.context, self.seed, self.mask_documents)
        from polarlm.data.order import PackedSequences

        padding = corpus.tokenizer.eos_id or 0
        return PackedSequences(store, self.context, self.seed, self.packing, self.mask_documents, padding)

    def train_dataloader(self) -> Prefetched:
        rank, world, accumulate, step = 0, 1, 1, 0
        if self.trainer is not None:
            rank, world = self.trainer.global_rank, self.trainer.world_size
            accumulate, step = self.trainer.accumulate_grad_batches, self.trainer.global_step
        return Prefetched(lambda: self._steps_from(step, rank, world, accumulate))

    def batches_of_step(self, step: int, rank: int = 0, world: int = 1) -> list[Batch]:
        """The micro-batches of one rank in one optimiser step (from 0), once more."""
        accumulate = self.trainer.accumulate_grad_batches if self.trainer is not None else 1
        return list(itertools.islice(self._steps_from(step, rank, world, accumulate), accumulate))

    def _steps_from(self, step: int, rank: int, world: int, accumulate: int) -> Iterator[Batch]:
        sequences, borders = self.sequences(), [after for after, _ in self.detours if after > step]
        for end in [*borders, None]:
            start = step + sum(skipped for after, skipped in self.detours if after <= step)
            batches = train_batches(sequences, self.micro_batch, rank, world, start * accumulate, accumulate)
            yield from itertools.islice(batches, None if end is None else (end - step) * accumulate)
            step = end or step

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimiser step: all micro-batches of all processes."""
        trainer = self.trainer
        cuts = trainer.accumulate_grad_batches * trainer.world_size if trainer is not None else 1
        return self.context * self.micro_batch * cuts

    def eval_dataloader(self, split: str, *, whole: bool = False) -> EvalLoader:
        """Every token of a split once (see EvalBatches), this rank's share; without `whole`, the first eval_tokens."""
        rank, world = (self.trainer.global_rank, self.trainer.world_size) if self.trainer is not None else (0, 1)
        tokens = None if whole else self.eval_tokens
        return EvalLoader(self._eval_batches(split, rank, world, tokens), self.corpus, tokens)

    def _eval_batches(self, split: str, rank: int = 0, world: int = 1, tokens: int | None = None) -> EvalBatches:
        store, probe = self.corpus.store(split), self.corpus.probe
        return eval_batches(store, probe, self.context, self.micro_batch, rank, world, tokens, self.mask_documents)

    def val_dataloader(self) -> EvalLoader | list[EvalLoader]:
        """While training the first eval_tokens of `val`, after the last step every evaluation split, whole."""
        trainer = self.trainer
        if trainer is None or trainer.state.fn != "fit":
            return self.eval_dataloader("val", whole=trainer is not None)
        if trainer.global_step < trainer.max_steps:
            return self.eval_dataloader("val")
        return [self.eval_dataloader(split, whole=True) for split in self.corpus.splits if split != "train"]

    def test_dataloader(self) -> EvalLoader:
        return self.eval_dataloader("test", whole=True)
