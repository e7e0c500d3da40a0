from collections import Counter
from collections.abc import Callable
from itertools import islice

import numpy as np
import pytest
import torch

from polarlm.data import Corpus
from polarlm.data.module import EvalBatches, train_batches
from polarlm.data.order import EpochOrder, PackedSequences, Sequences, WindowSequences
from polarlm.errors import UserError
from polarlm.ignored import IGNORED
from tests.data.conftest import made_up_documents

Build = Callable[..., Corpus]


@pytest.fixture
def corpus(documents: list[str], corpus_of: Build) -> Corpus:
    return corpus_of(documents, section_bytes=20_000)


def test_targets_are_the_next_tokens(corpus: Corpus) -> None:
    store = corpus.store("train")
    sequences = WindowSequences(store, 32, seed=1)
    numbers = np.arange(50)
    tokens, targets, documents = sequences.rows(numbers)
    for row, begin in enumerate(sequences.begins(numbers).tolist()):
        assert np.array_equal(tokens[row], store[begin : begin + 32])
        assert np.array_equal(targets[row], store[begin + 1 : begin + 33])
    assert documents is None


def test_an_epoch_covers_the_text_and_the_next_is_ordered_otherwise(corpus: Corpus) -> None:
    store = corpus.store("train")
    sequences = WindowSequences(store, 64, seed=3)
    count = sequences.order.per_epoch
    epochs = [sequences.begins(np.arange(e * count, (e + 1) * count)) for e in range(2)]
    for begins in epochs:
        covered = np.zeros(len(store), int)
        for begin in begins.tolist():
            covered[begin : begin + 64] += 1
        assert (covered == 0).sum() <= 2 * 64 and (covered > 1).sum() <= 64
    assert not np.array_equal(*epochs)


def test_an_epoch_is_every_whole_window_once_at_one_phase_and_phases_differ(corpus: Corpus) -> None:
    store, context = corpus.store("train"), 64
    sequences = WindowSequences(store, context, seed=3)
    count, last = (len(store) - 1) // context, len(store) - 1 - context
    phases, ends = [], []
    for epoch in range(12):
        begins = np.sort(sequences.begins(np.arange(epoch * count, (epoch + 1) * count)))
        phases.append(int(begins[0]))
        ends.append(int(begins[-1]))
        assert np.array_equal(begins, np.minimum(np.arange(count) * context + phases[-1], last))
    assert max(phases) < context and len(set(phases)) > 6
    assert max(ends) == last  # some epoch trains on the very last token


def test_the_phase_of_an_epoch_is_the_seeds(corpus: Corpus) -> None:
    store, context = corpus.store("train"), 64
    phases = []
    for seed in range(12):
        sequences = WindowSequences(store, context, seed)
        phases.append(int(sequences.begins(np.arange(sequences.order.per_epoch)).min()))
    assert len(set(phases)) > 6 and max(phases) < context


@pytest.mark.parametrize(("world", "micro", "accumulate"), [(1, 16, 1), (2, 8, 1), (4, 4, 1), (2, 4, 2), (1, 4, 4)])
def test_ranks_and_micro_batches_give_the_same_global_batches(
    corpus: Corpus, world: int, micro: int, accumulate: int
) -> None:
    store = corpus.store("train")
    wanted = [batch["tokens"] for batch in islice(train_batches(WindowSequences(store, 16, seed=5), 16), 6)]
    ranks = [train_batches(WindowSequences(store, 16, seed=5), micro, rank, world) for rank in range(world)]
    for step in range(6):
        rows = [next(rank)["tokens"] for _ in range(accumulate) for rank in ranks]
        assert torch.equal(torch.cat(rows), wanted[step])


def test_starting_at_any_step_continues_exactly(corpus: Corpus) -> None:
    store = corpus.store("train")
    whole = list(islice(train_batches(WindowSequences(store, 16, seed=2), 4), 3000))
    for start in (1, 7, 1023, 2990):
        late = next(train_batches(WindowSequences(store, 16, seed=2), 4, start=start))
        assert torch.equal(late["tokens"], whole[start]["tokens"])


def test_seeds_differ(corpus: Corpus) -> None:
    rows = [WindowSequences(corpus.store("train"), 16, seed=s).begins(np.arange(100)) for s in (1, 2)]
    assert (rows[0] != rows[1]).mean() > 0.9


def test_the_order_of_an_epoch_is_its_own_and_the_seeds() -> None:
    first, next_epoch = (EpochOrder(500, seed=3)(np.arange(e * 500, (e + 1) * 500))[1] for e in range(2))
    other_seed = EpochOrder(500, seed=4)(np.arange(500))[1]
    assert (first != next_epoch).mean() > 0.9 and (first != other_seed).mean() > 0.9


def test_borders_are_masked_and_documents_numbered(corpus: Corpus) -> None:
    store, eos = corpus.store("train"), corpus.tokenizer.eos_id
    tokens, targets, documents = WindowSequences(store, 128, seed=1, mask_documents=True).rows(np.arange(40))
    assert documents is not None
    border = tokens == eos
    assert (targets[border] == IGNORED).all() and (targets[~border] != IGNORED).all()
    # A document's number rises right after its end.
    assert np.array_equal(np.diff(documents, axis=1) == 1, border[:, :-1])


@pytest.mark.parametrize(("world", "accumulate"), [(1, 1), (2, 1), (1, 4), (2, 2)])
@pytest.mark.parametrize("packing", ["windows", "aligned"])
def test_weighing_by_counted_targets_is_the_mean_over_the_step(
    corpus: Corpus, packing: str, world: int, accumulate: int
) -> None:
    store = corpus.store("train")
    micro = 8 // (world * accumulate)

    def sequences() -> Sequences:
        if packing == "windows":
            return WindowSequences(store, 64, seed=3, mask_documents=True)
        return PackedSequences(store, 64, 3, "aligned", mask_documents=True)

    ranks = [train_batches(sequences(), micro, rank, world, accumulate, accumulate) for rank in range(world)]
    whole = train_batches(sequences(), 8, start=1)
    for _ in range(5):
        targets = next(whole)["targets"]
        wanted = targets[targets != IGNORED].double().mean()
        shares = []
        for batch in (next(rank) for _ in range(accumulate) for rank in ranks):
            own = batch["targets"][batch["targets"] != IGNORED].double().sum()
            shares.append(own / batch["counted"])
        assert torch.stack(shares).mean().item() == pytest.approx(wanted.item(), rel=1e-6)


def test_where_every_target_counts_the_count_is_the_batch(corpus: Corpus) -> None:
    batch = next(train_batches(WindowSequences(corpus.store("train"), 16, seed=1), 4, world=3, accumulate=2))
    assert batch["counted"].item() == 64 and batch["counted"].dtype == torch.float32


def test_counted_targets_are_those_of_the_rows(corpus: Corpus) -> None:
    """Over so many windows that some begin or end where a document does."""
    store = corpus.store("train")
    sequences = WindowSequences(store, 32, seed=1, mask_documents=True)
    numbers = np.arange(3 * sequences.order.per_epoch)
    begins, starts = sequences.begins(numbers), store.document_starts(0, len(store))
    assert np.isin(begins, starts).any() and np.isin(begins + 32, starts).any()
    counts = sequences.counted(numbers)
    assert np.array_equal(counts, (sequences.rows(numbers)[1] != IGNORED).sum(1)) and len(set(counts.tolist())) > 2


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("tokens", [None, 1000])
def test_evaluation_counts_every_token_but_the_first_once(corpus: Corpus, world: int, tokens: int | None) -> None:
    store = corpus.store("val")
    loaders = [EvalBatches(store, 48, 5, rank, world, tokens) for rank in range(world)]
    assert len({len(loader) for loader in loaders}) == 1
    counted: Counter[int] = Counter()
    for loader in loaders:
        batches = list(loader)
        assert len(batches) == len(loader)
        for batch in batches:
            assert batch["tokens"].shape == (5, 48)
            counted.update(batch["targets"][batch["targets"] != IGNORED].tolist())
    assert counted == Counter(store[1:tokens].tolist())


def test_evaluation_order_is_the_text(corpus: Corpus) -> None:
    store = corpus.store("val")
    targets = torch.cat([batch["targets"].flatten() for batch in EvalBatches(store, 48, 5)])
    assert targets[targets != IGNORED].tolist() == store[1:].tolist()


@pytest.mark.parametrize("world", [1, 2])
def test_evaluation_counts_targets_across_document_borders_only_without_the_mask(corpus: Corpus, world: int) -> None:
    store, eos = corpus.store("val"), corpus.tokenizer.eos_id
    inner_borders = store.documents - 1  # every document but the first is entered from its predecessor's end
    for mask, wanted in ((False, len(store) - 1), (True, len(store) - 1 - inner_borders)):
        batches = [b for rank in range(world) for b in EvalBatches(store, 48, 5, rank, world, mask_documents=mask)]
        tokens, targets = (torch.cat([batch[name] for batch in batches]) for name in ("tokens", "targets"))
        assert (targets != IGNORED).sum() == wanted
        crossing = (tokens == eos) & (targets != IGNORED)
        assert crossing.sum() == (0 if mask else inner_borders)
        if not mask:
            assert "documents" not in batches[0]
            continue
        documents = torch.cat([batch["documents"] for batch in batches])
        inside = (documents[:, 1:] == documents[:, :-1]) & (targets[:, :-1] != IGNORED)
        inside &= tokens[:, 1:] != 0  # what fills the last window
        # Within a document the next token is the target; behind its end another number begins.
        assert torch.equal(targets[:, :-1][inside], tokens[:, 1:][inside])
        ends = (tokens[:, :-1] == eos) & (targets[:, 1:] != IGNORED)
        assert (documents[:, 1:][ends] == documents[:, :-1][ends] + 1).all() and ends.sum() > 10


def test_a_context_longer_than_the_text_is_refused(corpus_of: Build) -> None:
    corpus = corpus_of(made_up_documents(12, longest=3))
    length = len(corpus.store("train"))
    WindowSequences(corpus.store("train"), length - 1, seed=1).rows(np.arange(3))
    with pytest.raises(UserError, match=rf"model.context={length} is longer than the train split \({length} tokens"):
        WindowSequences(corpus.store("train"), length, seed=1)


def test_a_corpus_smaller_than_one_batch_repeats_itself(corpus_of: Build) -> None:
    store = corpus_of(made_up_documents(12, longest=3)).store("train")
    batch = next(train_batches(WindowSequences(store, len(store) // 2, seed=1), 64))
    assert batch["tokens"].shape[0] == 64
