import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from polarlm.data import Corpus, LMDataModule
from polarlm.data.module import Batch, Prefetched
from polarlm.errors import UserError

Build = Callable[..., Corpus]


@pytest.fixture
def module(documents: list[str], corpus_of: Build) -> LMDataModule:
    return LMDataModule(corpus_of(documents), context=16, micro_batch=4, seed=1)


def at(module: LMDataModule, step: int, rank: int = 0, world: int = 1, accumulate: int = 1) -> Iterator[Batch]:
    module.trainer = SimpleNamespace(  # type: ignore[assignment]
        global_step=step, global_rank=rank, world_size=world, accumulate_grad_batches=accumulate
    )
    return iter(module.train_dataloader())


def test_training_continues_at_the_trainers_step(module: LMDataModule) -> None:
    whole = at(module, 0)
    batches = [next(whole)["tokens"] for _ in range(13)]
    assert torch.equal(next(at(module, 5))["tokens"], batches[5])
    assert torch.equal(next(at(module, 6, accumulate=2))["tokens"], batches[12])


def test_iterating_again_begins_again(module: LMDataModule) -> None:
    loader = module.train_dataloader()
    first, second = (next(iter(loader))["tokens"] for _ in range(2))
    assert torch.equal(first, second)


def test_ranks_share_the_global_batch(module: LMDataModule) -> None:
    single = LMDataModule(module.corpus, context=16, micro_batch=8, seed=1)
    wanted = next(at(single, 3))["tokens"]
    assert torch.equal(torch.cat([next(at(module, 3, rank, 2))["tokens"] for rank in range(2)]), wanted)


def test_batches_are_ready_before_they_are_needed() -> None:
    made: list[int] = []

    def batches() -> Iterator[Batch]:
        for number in range(10):
            made.append(number)
            yield {"tokens": torch.tensor([number])}

    loader = iter(Prefetched(batches))
    assert int(next(loader)["tokens"]) == 0
    deadline = time.monotonic() + 120
    while len(made) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert 3 <= len(made) <= 5


def test_an_abandoned_loader_leaves_no_thread(module: LMDataModule) -> None:
    loader = at(module, 0)
    next(loader)
    loader.close()  # type: ignore[attr-defined]
    assert not [thread for thread in threading.enumerate() if thread.name == "polarlm-batches" and thread.is_alive()]


def test_an_error_while_reading_reaches_the_reader() -> None:
    def broken() -> Iterator[Batch]:
        yield {}
        raise OSError("disk on fire")

    loader = iter(Prefetched(broken))
    next(loader)
    with pytest.raises(OSError, match="disk on fire"):
        next(loader)


def test_validation_can_be_read_again_and_has_a_length(module: LMDataModule) -> None:
    loader = module.val_dataloader()
    assert sum(1 for _ in loader) == sum(1 for _ in loader) == len(loader)


def test_wrong_settings_are_refused_at_once(documents: list[str], corpus_of: Build) -> None:
    corpus = corpus_of(documents)
    with pytest.raises(UserError, match=r"model.context=10000000 is longer"):
        LMDataModule(corpus, context=10**7, micro_batch=1, seed=1)
    with pytest.raises(UserError, match=r"data.packing='tight'"):
        LMDataModule(corpus, context=8, micro_batch=1, seed=1, packing="tight")
    with pytest.raises(UserError, match=r"no split 'dev'; it has train, val, test"):
        corpus.store("dev")
