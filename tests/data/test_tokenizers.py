import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from polarlm.data import build_corpus
from polarlm.data.readers import pieces_of
from polarlm.data.tokenizer import (
    ByteTokenizer,
    CharTokenizer,
    SubwordTokenizer,
    Tokenizer,
    WordTokenizer,
    load_tokenizer,
    make_tokenizer,
    read_tokenizer_config,
)
from polarlm.errors import UserError
from tests.data.conftest import made_up_documents

AWKWARD = [
    "",
    " ",
    "\n\n  x\r\n",
    "\x00\x01",
    "<|endoftext|> is text",
    "don't  stop \t",
    "½ ≥ 😀👩‍👩‍👧 e\u0301",
    "a" * 5000,
]


def trained(vocab_size: int = 320) -> SubwordTokenizer:
    return SubwordTokenizer.train(made_up_documents(200), vocab_size)


@pytest.mark.parametrize("make", [ByteTokenizer, trained, lambda: CharTokenizer.train(AWKWARD)])
@pytest.mark.parametrize("text", AWKWARD)
def test_what_is_encoded_decodes_to_itself(make: object, text: str) -> None:
    tokenizer: Tokenizer = make()  # type: ignore[operator]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and all(0 <= i < tokenizer.vocab_size for i in ids)


@pytest.mark.parametrize(
    "tokenizer",
    [ByteTokenizer(), CharTokenizer("abc"), WordTokenizer.train(["a b a"]), trained()],
    ids=lambda t: t.kind,
)
def test_a_saved_tokenizer_is_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.fingerprint == tokenizer.fingerprint and again.vocab_size == tokenizer.vocab_size
    assert again.eos_id == tokenizer.eos_id and again.encode("a") == tokenizer.encode("a")


@pytest.mark.parametrize(
    "tokenizer",
    [ByteTokenizer(), CharTokenizer.train(AWKWARD), WordTokenizer.train(["a b\n", "c"]), trained()],
    ids=lambda t: t.kind,
)
def test_the_standard_file_gives_the_same_ids(tokenizer: Tokenizer, tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Library

    tokenizer.save(tmp_path)
    library = Library.from_file(str(tmp_path / "tokenizer.json"))
    library.encode_special_tokens = True
    for text in [*AWKWARD, "a b\nc d\n"] if tokenizer.kind != "char" else AWKWARD:
        ids = tokenizer.encode(text)
        assert library.encode(text, add_special_tokens=False).ids == ids
        assert tokenizer.kind == "word" or library.decode(ids, skip_special_tokens=False) == text


def test_a_special_token_in_a_document_is_ordinary_text() -> None:
    tokenizer = trained()
    ids = tokenizer.encode("a <|endoftext|> b")
    assert (
        tokenizer.eos_id not in ids
        and max(ids) < tokenizer.vocab_size
        and tokenizer.encode_slowly(["a <|endoftext|> b"]) == [ids]
    )


def test_training_twice_gives_the_same_vocabulary() -> None:
    assert trained().fingerprint == trained().fingerprint


def test_a_trained_bpe_has_all_bytes_its_size_and_a_standard_file(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Library

    tokenizer = trained()
    tokenizer.save(tmp_path)
    assert tokenizer.vocab_size == 320 and tokenizer.eos_id == 0
    library = Library.from_file(str(tmp_path / "tokenizer.json"))
    assert library.encode("über 42 owls").ids == tokenizer.encode("über 42 owls")


def test_pieces_of_a_document_have_the_ids_of_the_whole() -> None:
    tokenizer, text = trained(), " ".join(made_up_documents(60))
    parts = [tokenizer.encode(piece.text) for piece in pieces_of([text], 500)]
    assert len(parts) > 20 and [i for part in parts for i in part] == tokenizer.encode(text)


def test_words_are_counted_as_wikitext_counts_them() -> None:
    tokenizer = WordTokenizer.train([" = Title = \n the <unk> the \n"])
    assert tokenizer.words == ["<eos>", "<unk>", "=", "the", "Title"]
    assert tokenizer.encode(" the dog \n \n") == [3, 1, 0, 0] and tokenizer.unknown_id == 1


def test_unknown_characters_are_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"does not know 'ü'.*tokenizer=byte"):
        CharTokenizer("abc").encode("abü")


def test_a_tokenizer_that_lacks_bytes_is_refused_or_counts_its_unknowns(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Library
    from tokenizers import models, pre_tokenizers

    dropping = Library(models.BPE({"a": 0, "b": 1}, []))
    dropping.save(str(tmp_path / "tokenizer.json"))
    tokenizer = SubwordTokenizer.from_file(tmp_path)
    assert tokenizer.encode("abba") == [0, 1, 1, 0]
    with pytest.raises(UserError, match=r"drops text it does not know .*'z'"):
        tokenizer.encode("abz")
    words = Library(models.WordLevel({"[UNK]": 0, "cat": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    tokenizer = SubwordTokenizer.from_file(tmp_path)
    assert tokenizer.encode("cat dog") == [1, 0] and tokenizer.unknown_id == 0 and not tokenizer.splittable


def test_wrong_tokenizer_settings_say_what_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer.vocabsize is not an option. Did you mean vocab_size"):
        read_tokenizer_config({"kind": "bpe", "vocabsize": 3})
    with pytest.raises(
        UserError, match=r"tokenizer.kind='bytes' is not allowed. Did you mean byte. Choose one of byte, char"
    ):
        read_tokenizer_config({"kind": "bytes"})
    with pytest.raises(UserError, match=r"too small: 256 bytes"):
        SubwordTokenizer.train(["a"], 200)
    with pytest.raises(UserError, match=r"no tokenizer.json there"):
        make_tokenizer(read_tokenizer_config({"kind": "file", "path": str(tmp_path)}), lambda _: iter(()))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"not a readable tokenizer.json"):
        SubwordTokenizer.from_file(tmp_path)


@pytest.mark.parametrize("kind", ["bpe", "word"])
@pytest.mark.parametrize("mixture", [False, True])
def test_a_vocabulary_is_learned_from_the_train_split_alone(tmp_path: Path, kind: str, mixture: bool) -> None:
    for name, text in (("train", "the cat sat on the mat\n"), ("valid", "zyzzyva\n"), ("test", "quokka\n")):
        (tmp_path / f"{name}.txt").write_text(text * 500)
    data: dict[str, Any] = {"path": f"{tmp_path}/*.txt", "split": {"rule": "own"}}
    if mixture:
        data = {"name": "m", "source": "mixture", "parts": {"a": {**data, "name": "a"}}, "weights": {"a": 1}}
    corpus = build_corpus(data, {"kind": kind, "vocab_size": 400}, tmp_path / "cache")
    saved = json.loads((corpus.folder / "tokenizer" / "tokenizer.json").read_text())
    learned = "".join(saved["model"]["vocab"])
    assert "cat" in learned and "zyz" not in learned and "quo" not in learned


@pytest.mark.slow
def test_the_fast_path_equals_tokenizers_on_every_document(shared_data: Path) -> None:
    """All test corpora with GPT-2's vocabulary; long documents by their beginning (benchmarks/data.py: the whole)."""
    tokenizer = SubwordTokenizer.from_file(shared_data / "gpt2-tokenizer")
    assert tokenizer.splittable
    with lzma.open(shared_data / "gutenberg_dev.jsonl.xz", "rt") as novels:
        texts = [json.loads(line)["text"][:30_000] for line in novels]
    texts += [json.loads(line)["text"] for line in (shared_data / "lambada/lambada_dev.jsonl").read_text().splitlines()]
    for name in ("tinystories/tiny_stories.txt", "tinyshakespeare/input.txt"):
        texts.append((shared_data / name).read_text()[:300_000])
    for name in ("wikitext-2-raw/wiki.valid.raw.xz", "enwik8/enwik8-first20m.xz"):
        with lzma.open(shared_data / name, "rt") as file:
            texts.append(file.read(300_000))
    pieces = [piece.text for text in texts for piece in pieces_of([text], 20_000)]
    for text, slow in zip(pieces, tokenizer.encode_slowly(pieces)):
        assert tokenizer.encode(text) == slow


def test_a_tokenizer_that_gives_one_id_to_two_tokens_is_refused(tmp_path):
    ByteTokenizer().save(tmp_path)
    library = json.loads((tmp_path / "tokenizer.json").read_text())
    library["added_tokens"].append({**library["added_tokens"][0], "content": "<twice>"})
    library["model"]["vocab"]["twice"] = 65
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(library))
    with pytest.raises(UserError, match="one id to several tokens"):
        load_tokenizer(tmp_path / "other")
