import errno
import itertools
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from polarlm.data import Corpus
from polarlm.data.order import PackedSequences, packing_plan
from polarlm.ignored import IGNORED
from tests.data.conftest import made_up_documents

Build = Callable[..., Corpus]
CONTEXT = 256


@pytest.fixture
def corpus(corpus_of: Build) -> Corpus:
    return corpus_of(made_up_documents(300, longest=80), "bpe", section_bytes=9000)


def packed(corpus: Corpus, packing: str, **options: bool) -> PackedSequences:
    return PackedSequences(corpus.store("train"), CONTEXT, 1, packing, padding=7, **options)


@pytest.mark.parametrize("packing", ["aligned", "best_fit"])
def test_an_epoch_holds_every_token_exactly_once(corpus: Corpus, packing: str) -> None:
    sequences = packed(corpus, packing, mask_documents=True)
    tokens, targets, documents = sequences.rows(np.arange(sequences.order.per_epoch))
    store = corpus.store("train")
    assert documents is not None
    padding = int((tokens.size) - len(store))
    counted = Counter(tokens.flatten().tolist())
    counted[7] -= padding
    assert +counted == Counter(store[:].tolist())
    # Only the last token of a document (nothing follows it) and the padding are without a target.
    assert (targets != IGNORED).sum() == len(store) - store.documents


@pytest.mark.parametrize("packing", ["aligned", "best_fit"])
def test_every_document_begins_a_sequence_or_follows_a_whole_one(corpus: Corpus, packing: str) -> None:
    sequences = packed(corpus, packing, mask_documents=True)
    tokens, _, documents = sequences.rows(np.arange(sequences.order.per_epoch))
    assert documents is not None
    # Its number rises after its end and only there; what is padded counts as a document more.
    assert np.array_equal(np.diff(documents, axis=1) == 1, tokens[:, :-1] == corpus.tokenizer.eos_id)


def test_targets_do_not_cross_documents(corpus: Corpus) -> None:
    tokens, targets, documents = packed(corpus, "best_fit", mask_documents=True).rows(np.arange(20))
    assert documents is not None
    inside = (documents[:, 1:] == documents[:, :-1]) & (targets[:, :-1] != IGNORED)
    assert (targets[:, :-1][inside] == tokens[:, 1:][inside]).all()
    assert (targets[:, :-1][documents[:, 1:] != documents[:, :-1]] == IGNORED).all()


def test_a_long_document_continues_in_its_next_chunk(corpus_of: Build) -> None:
    corpus = corpus_of(made_up_documents(12, longest=4000), "bpe")
    sequences = packed(corpus, "aligned")
    _, targets, documents = sequences.rows(np.arange(sequences.order.per_epoch))
    assert documents is None
    assert (targets != IGNORED).sum() == len(corpus.store("train")) - corpus.store("train").documents


def test_best_fit_wastes_less_than_packing_in_order(corpus: Corpus) -> None:
    tokens = len(corpus.store("train"))
    in_order, best = (packed(corpus, packing).order.per_epoch * CONTEXT for packing in ("aligned", "best_fit"))
    assert tokens / best > max(tokens / in_order, 0.95)


def test_best_fit_takes_long_documents_first(corpus_of: Build) -> None:
    """Five tokens and seven fill twelve; in corpus order the short documents would be packed with each other."""
    store = corpus_of([f"a{n:03}" for n in range(60)] + [f"long{n:02}" for n in range(60)]).store("train")
    lengths = np.diff(np.append(store.document_starts(0, len(store)), len(store)))
    short, long = int((lengths == 5).sum()), int((lengths == 7).sum())
    assert min(short, long) > 30 and short + long == len(lengths)
    fewest = long + max(0, -(-(short - long) // 2))
    assert PackedSequences(store, 12, 1, "best_fit").order.per_epoch == fewest


class Chunks:
    """A store of documents with these lengths, as far as packing looks at one."""

    split, fingerprint = "train", "0" * 12

    def __init__(self, folder: Path, lengths: list[int]):
        self.folder, self.begins, self.length = folder, np.cumsum([0, *lengths[:-1]]), sum(lengths)

    def __len__(self) -> int:
        return self.length

    def document_starts(self, begin: int, end: int) -> np.ndarray:
        return self.begins[(self.begins >= begin) & (self.begins < end)]


def test_best_fit_takes_the_fullest_sequence_that_has_room(tmp_path: Path) -> None:
    """Ten tokens hold 6 + 4 and 5 + 3 + 2; 4 put into the emptier sequence, beside 5, would need a third one."""
    _, lengths, _, borders = packing_plan(Chunks(tmp_path, [2, 5, 4, 3, 6]), 10, "best_fit")  # type: ignore[arg-type]
    packed = [sorted(lengths[a:b].tolist()) for a, b in itertools.pairwise(borders.tolist())]
    assert sorted(packed) == [[2, 3, 5], [4, 6]]


def test_the_order_is_a_function_of_the_seed(corpus: Corpus) -> None:
    first, second = (packed(corpus, "best_fit").rows(np.arange(30))[0] for _ in range(2))
    assert np.array_equal(first, second)


@pytest.mark.parametrize("packing", ["aligned", "best_fit"])
def test_counted_targets_are_those_of_the_rows(corpus: Corpus, packing: str) -> None:
    sequences, numbers = packed(corpus, packing), np.arange(60)
    counts = sequences.counted(numbers)
    assert np.array_equal(counts, (sequences.rows(numbers)[1] != IGNORED).sum(1))
    assert len(set(counts.tolist())) > 3


def test_a_store_that_cannot_be_written_is_packed_all_the_same(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = packed(corpus, "best_fit").rows(np.arange(30))[0]
    folder = corpus.folder / "packed"
    shutil.rmtree(folder)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(np, "save", refuse)
    assert np.array_equal(packed(corpus, "best_fit").rows(np.arange(30))[0], kept)
    assert not list(folder.iterdir())
