"""The Lightning data module: prepared corpus in, batches out, each ready before the step that needs it."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator

import lightning.pytorch as pl
import torch

from polarlm.data.config import PACKINGS
from polarlm.data.corpus import Corpus
from polarlm.data.order.batches import Batch, EvalBatches, train_batches
from polarlm.data.order.examples import ExampleSequences, eval_batches
from polarlm.data.order.sequences import Sequences
from polarlm.data.order.windows import WindowSequences
from polarlm.errors import UserError

_ENDLESS = 10**9  # Lightning pre-fetches from loaders without a length and then loses a batch on resume
_AHEAD = 2


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
        from polarlm.data.order.mixture import MixtureSequences

        parts = [self._sequences_of(part) for part, _ in self.corpus.parts]
        return MixtureSequences(parts, [weight for _, weight in self.corpus.parts], self.seed)

    def _sequences_of(self, corpus: Corpus) -> Sequences:
        if corpus.stream is not None:
            from polarlm.data.order.streaming import StreamingSequences

            if self.packing != "stream":
                raise UserError(f"data.packing={self.packing} needs a prepared corpus; set data.streaming=false.")
            index = corpus.folder / "stream.jsonl"
            return StreamingSequences(*corpus.stream, corpus.tokenizer, self.context, index, self.mask_documents)
        store = corpus.store("train")
        if corpus.probe is not None:
            return ExampleSequences(store, corpus.probe, self.context, self.seed)
        if self.packing == "stream":
            return WindowSequences(store, self.context, self.seed, self.mask_documents)
        from polarlm.data.order.packing import PackedSequences

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

    def eval_dataloader(self, split: str, *, whole: bool = False) -> Prefetched:
        """Every token of a split once (see EvalBatches), this rank's share; without `whole`, the first eval_tokens."""
        rank, world = (self.trainer.global_rank, self.trainer.world_size) if self.trainer is not None else (0, 1)
        batches = self._eval_batches(split, rank, world, None if whole else self.eval_tokens)
        return Prefetched(lambda: batches, len(batches))

    def _eval_batches(self, split: str, rank: int = 0, world: int = 1, tokens: int | None = None) -> EvalBatches:
        store, probe = self.corpus.store(split), self.corpus.probe
        return eval_batches(store, probe, self.context, self.micro_batch, rank, world, tokens, self.mask_documents)

    def val_dataloader(self) -> Prefetched:
        return self.eval_dataloader("val")

    def test_dataloader(self) -> Prefetched:
        return self.eval_dataloader("test")
