from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlm.data import Corpus, LMDataModule, build_corpus
from polarlm.data.order import MixtureSequences
from polarlm.errors import UserError


class Numbered:
    """A line of sequences whose rows say which corpus and number they are."""

    def __init__(self, name: int):
        self.name = name

    def rows(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, None]:
        return np.stack([np.full(len(numbers), self.name), numbers], 1), numbers[:, None], None

    def counted(self, numbers: np.ndarray) -> np.ndarray:
        return 100 * numbers + self.name


def test_proportions_are_exact_and_every_corpus_keeps_its_own_order() -> None:
    mixture = MixtureSequences([Numbered(0), Numbered(1), Numbered(2)], [5, 3, 2], seed=4)
    tokens, _, _ = mixture.rows(np.arange(8192))
    counts = np.bincount(tokens[:, 0])
    assert np.abs(counts / 8192 - [0.5, 0.3, 0.2]).max() < 1 / 4096
    for part in range(3):
        assert sorted(tokens[tokens[:, 0] == part, 1].tolist()) == list(range(counts[part]))


def test_any_sequence_can_be_asked_for_alone() -> None:
    mixture = MixtureSequences([Numbered(0), Numbered(1)], [0.9, 0.1], seed=4)
    whole = mixture.rows(np.arange(9000))[0]
    assert np.array_equal(mixture.rows(np.array([8999, 17, 4096]))[0], whole[[8999, 17, 4096]])


def test_counted_targets_are_asked_of_the_part_that_a_sequence_comes_from() -> None:
    mixture, numbers = MixtureSequences([Numbered(0), Numbered(1)], [0.9, 0.1], seed=4), np.arange(5000)
    tokens = mixture.rows(numbers)[0]
    assert np.array_equal(mixture.counted(numbers), 100 * tokens[:, 1] + tokens[:, 0])


@pytest.fixture
def parts(tmp_path: Path) -> dict[str, Any]:
    for name in ("letters", "digits"):
        words = ["alpha", "beta", "gamma"] if name == "letters" else ["11", "222", "3"]
        (tmp_path / f"{name}.txt").write_text(" ".join(words * 400))
    return {
        name: {"name": name, "path": str(tmp_path / f"{name}.txt"), "split": {"val": 0.2}}
        for name in ("letters", "digits")
    }


def mixed(parts: dict[str, Any], tmp_path: Path, kind: str, **weights: float) -> Corpus:
    tokenizer = {"kind": kind} | ({"vocab_size": 270} if kind == "bpe" else {})
    return build_corpus(
        {"name": "mixture", "source": "mixture", "parts": parts, "weights": weights}, tokenizer, tmp_path / "c"
    )


@pytest.mark.parametrize("kind", ["byte", "char", "bpe"])
def test_parts_share_one_tokenizer_and_their_splits_are_joined(
    parts: dict[str, Any], tmp_path: Path, kind: str
) -> None:
    corpus = mixed(parts, tmp_path, kind, letters=3, digits=1)
    assert {part.tokenizer.fingerprint for part, _ in corpus.parts} == {corpus.tokenizer.fingerprint}
    val = corpus.store("val")
    text = corpus.tokenizer.decode(val[:].tolist())
    assert "alpha" in text and "222" in text
    assert len(val) == sum(len(part.store("val")) for part, _ in corpus.parts)
    assert corpus.fingerprint != mixed(parts, tmp_path, kind, letters=1, digits=1).fingerprint


def test_training_batches_follow_the_weights(parts: dict[str, Any], tmp_path: Path) -> None:
    module = LMDataModule(mixed(parts, tmp_path, "byte", letters=3, digits=1), context=8, micro_batch=64, seed=1)
    rows = np.concatenate([module.sequences().rows(np.arange(i, i + 64))[0] for i in range(0, 4096, 64)])
    letters = ((rows >= ord("a")) & (rows <= ord("z"))).any(1)
    assert abs(letters.mean() - 0.75) < 0.01


def test_weights_must_name_every_part(parts: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"positive weight to every part"):
        mixed(parts, tmp_path, "byte", letters=1)
