import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from polarlm.data import Corpus, build_corpus
from polarlm.data.corpus import find_damage
from polarlm.errors import UserError
from tests.data.conftest import made_up_documents

Build = Callable[..., Corpus]


def texts_of(corpus: Corpus, split: str) -> list[str]:
    store = corpus.store(split)
    starts = np.append(store.document_starts(0, len(store)), len(store)).tolist()
    return [corpus.tokenizer.decode(store[a:b].tolist()) for a, b in pairwise(starts)]


def test_the_store_holds_every_document_once_with_its_end(documents: list[str], corpus_of: Build) -> None:
    corpus = corpus_of(documents, "bpe")
    eos = corpus.tokenizer.decode([corpus.tokenizer.eos_id or 0])
    stored = [text for split in corpus.splits for text in texts_of(corpus, split)]
    assert sorted(stored) == sorted(text + eos for text in documents)


def test_bytes_per_token_are_exact(documents: list[str], corpus_of: Build) -> None:
    corpus = corpus_of(documents, "bpe")
    assert sum(corpus.store(split).bytes for split in corpus.splits) == sum(len(text.encode()) for text in documents)
    store = corpus.store("val")
    assert store.bytes_per_token == store.bytes / len(store)


def test_many_shards_read_like_one_array(documents: list[str], corpus_of: Build) -> None:
    whole = corpus_of(documents).store("train")
    parts = corpus_of(documents, section_bytes=5000).store("train")
    assert len(parts.shards) > 5 and len(whole.shards) == 1
    assert np.array_equal(whole[:], parts[:])
    begins = np.arange(0, len(whole) - 700, 331)
    assert np.array_equal(whole.windows(begins, 700), parts.windows(begins, 700))
    for begin in begins.tolist():
        assert np.array_equal(whole.document_ids(begin, 700), parts.document_ids(begin, 700))
    assert parts[len(parts) + 5 : len(parts) + 9].size == 0


def test_documents_are_numbered_from_zero_wherever_a_window_begins(documents: list[str], corpus_of: Build) -> None:
    store = corpus_of(documents, section_bytes=9000).store("train")
    starts = store.document_starts(0, len(store))
    for begin in (0, 3, *starts[1:20].tolist()):
        expected = [np.isin(np.arange(begin + 1, begin + 1 + i), starts).sum() for i in range(500)]
        assert np.array_equal(store.document_ids(begin, 500), expected)


def test_ids_beyond_16_bits_use_32(tmp_path: Path, shared_data: Path, folder_of: Callable[[list[str]], Path]) -> None:
    corpus = build_corpus(
        {"path": str(folder_of(made_up_documents(30)))},
        {"kind": "file", "path": str(shared_data / "gpt2-tokenizer")},
        tmp_path,
    )
    assert corpus.manifest["dtype"] == "<u2"  # 50,257 ids fit
    from polarlm.data.tokenizer import CharTokenizer

    assert CharTokenizer("".join(map(chr, range(0x10000, 0x10000 + 70_000)))).dtype == np.dtype("<u4")


def test_a_store_is_opened_again_without_work(
    documents: list[str], corpus_of: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = corpus_of(documents)
    monkeypatch.setattr("polarlm.data.corpus.build_store", None)
    assert corpus_of(documents).fingerprint == first.fingerprint


@pytest.mark.parametrize(
    "change",
    [
        {"append_eos": False},
        {"newlines": "keep"},
        {"split": {"rule": "hash", "val": 0.2}},
        {"kind": "char"},
        {"max_bytes": 50_000},
    ],
)
def test_a_changed_option_is_another_store(documents: list[str], corpus_of: Build, change: dict[str, object]) -> None:
    assert corpus_of(documents).folder != corpus_of(documents, **change).folder


def test_a_changed_file_is_another_store(documents: list[str], corpus_of: Build) -> None:
    before = corpus_of(documents)
    assert corpus_of([documents[0] + "!"] + documents[1:]).fingerprint != before.fingerprint


def test_a_damaged_shard_is_found_and_rebuilt(
    documents: list[str], corpus_of: Build, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = corpus_of(documents, section_bytes=5000)
    intact = {path.name: path.read_bytes() for path in corpus.folder.iterdir() if path.is_file()}
    victim = corpus.folder / "train-00002.bin"
    content = bytearray(victim.read_bytes())
    content[100] ^= 1
    victim.write_bytes(content)
    assert list(find_damage(corpus)) == ["train-00002.bin"]
    (corpus.folder / "val-00001.docs").unlink()
    again = corpus_of(documents, section_bytes=5000)
    assert "does not match its checksum" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in again.folder.iterdir() if path.is_file()} == intact


def test_a_damaged_store_without_its_source_is_refused(documents: list[str], corpus_of: Build, tmp_path: Path) -> None:
    corpus = corpus_of(documents)
    (corpus.folder / "train-00000.bin").write_bytes(b"")
    for file in (tmp_path / "texts").iterdir():
        file.unlink()
    with pytest.raises(UserError, match="folder without text files"):
        build_corpus({"path": str(tmp_path / "texts")}, {"kind": "byte"}, tmp_path / "cache")


def test_large_stores_are_checked_when_a_file_has_changed(
    documents: list[str], corpus_of: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polarlm.data.corpus._ALWAYS_VERIFY", 0)
    corpus = corpus_of(documents)
    assert find_damage(corpus) == {} and (corpus.folder / "verified.json").exists()
    calls: list[object] = []
    monkeypatch.setattr("polarlm.data.corpus.shard_damage", lambda *given: calls.append(given))
    assert find_damage(corpus) == {} and not calls
    (corpus.folder / "val-00000.bin").touch()
    find_damage(corpus)
    assert calls


def test_content_is_the_tokens_not_their_place_name_or_time(documents: list[str], tmp_path: Path) -> None:
    def build(name: str, texts: list[str], kind: str = "byte") -> Corpus:
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        data = {"name": name, "path": str(tmp_path / name), "split": {"rule": "hash", "val": 0.1}}
        return build_corpus(data, {"kind": kind}, tmp_path / "cache")

    first, same = build("first", documents), build("second", documents)
    assert first.fingerprint != same.fingerprint and first.content == same.content
    assert first.describe()["content"] == first.content
    assert build("third", documents[:-1] + [documents[-1] + "!"]).content != first.content
    assert build("fourth", documents, "char").content != first.content


def test_the_content_of_a_mixture_depends_on_parts_and_weights(documents: list[str], corpus_of: Build) -> None:
    parts = [corpus_of(documents), corpus_of(documents[:100])]
    contents = {
        replace(parts[0], parts=[(parts[0], weight), (parts[which], 1.0)]).content
        for weight in (1.0, 2.0)
        for which in (0, 1)
    }
    assert len(contents) == 4


def test_a_store_travels_to_a_worker_without_its_tokens(documents: list[str], corpus_of: Build) -> None:
    store = corpus_of(documents).store("train")
    expected = store[10:50]
    packed = pickle.dumps(store)
    assert len(packed) < 5000 and np.array_equal(pickle.loads(packed)[10:50], expected)


def test_leakage_between_own_splits_is_reported(tmp_path: Path) -> None:
    paragraph = "This paragraph is long enough to be looked for in the training text, every word of it. "
    shared = [f"{paragraph}{number}" for number in range(4)]
    (tmp_path / "train.txt").write_text("\n\n".join(["Only in train. " * 9, *shared[:2], shared[0]]))
    (tmp_path / "valid.txt").write_text("\n\n".join([*shared, shared[1], "short"]))  # one of them leaks twice
    corpus = build_corpus({"path": str(tmp_path)}, {"kind": "byte"}, tmp_path / "cache")
    assert corpus.manifest["leakage"]["val"]["paragraphs"] == {"checked": 5, "in_train": 3}
    assert corpus.manifest["leakage"]["val"]["documents"] == {"checked": 1, "in_train": 0}


def test_the_description_is_plain_json(documents: list[str], corpus_of: Build) -> None:
    described = corpus_of(documents).describe()
    assert json.loads(json.dumps(described)) == described and set(described["splits"]) == {"train", "val", "test"}
