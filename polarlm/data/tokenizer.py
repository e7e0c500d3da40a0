"""Tokenizers of bytes, characters and words, what a tokenizer yaml may say, and how each kind is made."""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from polarlm.data.atomic import write_beside, write_sorted_json
from polarlm.errors import UserError
from polarlm.settings import read_settings, setting

EOS = "<|endoftext|>"
DESCRIPTION = "polarlm_tokenizer.json"
KINDS = ("byte", "char", "word", "bpe", "file", "hub")


class Tokenizer(ABC):
    """What the store, generation and evaluation need to know of a tokenizer; it travels with the checkpoint."""

    kind: str
    vocab_size: int
    eos_id: int | None = None
    unknown_id: int | None = None
    # Whether encoding the pieces of a document one by one gives the ids of the whole (see documents.cut_point).
    splittable: bool = True

    @abstractmethod
    def encode_array(self, text: str) -> np.ndarray:
        """Ids of a text as an unsigned array; text that looks like a special token stays text."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of a sequence of ids."""

    @abstractmethod
    def description(self) -> dict[str, Any]:
        """Everything needed to build the tokenizer again, as plain JSON."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without an end-of-text token."""
        return self.encode_array(text).tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of several texts, one array each."""
        return [self.encode_array(text) for text in texts]

    @property
    def fingerprint(self) -> str:
        """The same for two tokenizers that give the same ids."""
        return hashlib.sha256(json.dumps(self.description(), sort_keys=True).encode()).hexdigest()

    @property
    def dtype(self) -> np.dtype:
        """The narrowest unsigned type that holds every id."""
        return np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")

    @abstractmethod
    def standard(self) -> str:
        """The content of a standard tokenizer.json that gives the same ids."""

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer into a folder from which `load_tokenizer`, or any other program, restores it."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        write_beside(Path(folder) / "tokenizer.json", self.standard().encode())
        write_sorted_json(Path(folder) / DESCRIPTION, self.description())


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0–255, and end of text as 256: nothing is unknown, nothing is lost."""

    kind = "byte"
    vocab_size = 257
    eos_id = 256

    def encode_array(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def description(self) -> dict[str, Any]:
        return {"kind": "byte"}

    def standard(self) -> str:
        return standard_bytes(self, EOS)


class CharTokenizer(Tokenizer):
    """One id per character of the corpus, in code-point order; no end-of-text token, as in the classic set-ups."""

    kind = "char"

    def __init__(self, alphabet: str):
        if not isinstance(alphabet, str) or not alphabet or list(alphabet) != sorted(set(alphabet)):
            raise UserError("A character tokenizer needs its characters in order, each once.")
        self.alphabet = alphabet
        self.vocab_size = len(alphabet)
        self._points = np.array([ord(c) for c in alphabet], np.uint32)

    @classmethod
    def train(cls, texts: Iterable[str]) -> CharTokenizer:
        """Collect the alphabet of a corpus."""
        characters: set[str] = set()
        for text in texts:
            characters.update(text)
        return cls("".join(sorted(characters)))

    def encode_array(self, text: str) -> np.ndarray:
        points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        ids = np.minimum(np.searchsorted(self._points, points), self.vocab_size - 1)
        missing = self._points[ids] != points
        if missing.any():
            unknown = sorted({chr(p) for p in points[missing][:1000]})
            raise UserError(
                f"The character tokenizer does not know {' '.join(map(repr, unknown[:8]))}: its alphabet are "
                f"the {self.vocab_size} characters of its corpus. tokenizer=byte and tokenizer=bpe know any text."
            )
        return ids.astype(self.dtype)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.alphabet[i] for i in ids)

    def description(self) -> dict[str, Any]:
        return {"kind": "char", "alphabet": self.alphabet}

    def standard(self) -> str:
        return standard_characters(self)


class WordTokenizer(Tokenizer):
    """White-space words with `<eos>` for every line end: how WikiText and Penn Treebank perplexities are counted."""

    kind = "word"

    def __init__(self, words: list[str]):
        if len(set(words)) != len(words) or not {"<eos>", "<unk>"} <= set(words):
            raise UserError("A word tokenizer needs every word once, <eos> and <unk> among them.")
        self.words = words
        self.vocab_size = len(words)
        self._ids = {word: i for i, word in enumerate(words)}
        self._newline = self._ids["<eos>"]
        self.unknown_id = self._ids["<unk>"]

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int | None = None, min_frequency: int = 1) -> WordTokenizer:
        """Count the words of the train split; most frequent first, ties by spelling."""
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(text.split())
        for special in ("<eos>", "<unk>"):
            counts.pop(special, None)
        ranked = sorted((w for w, n in counts.items() if n >= min_frequency), key=lambda w: (-counts[w], w))
        return cls(["<eos>", "<unk>"] + ranked[: vocab_size - 2 if vocab_size else None])

    def encode_array(self, text: str) -> np.ndarray:
        get, unknown, ids = self._ids.get, self.unknown_id, []
        lines = text.split("\n")
        for number, line in enumerate(lines):
            ids.extend([get(word, unknown) for word in line.split()])
            if number < len(lines) - 1:
                ids.append(self._newline)
        return np.array(ids, self.dtype)

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(self.words[i] for i in ids).replace("<eos>", "\n")

    def description(self) -> dict[str, Any]:
        return {"kind": "word", "words": self.words}

    def standard(self) -> str:
        return standard_words(self)


def tokenizer_file(path: str | Path) -> Path:
    """A tokenizer.json, from its own path or that of its folder."""
    given = Path(os.path.expanduser(path))
    file = given / "tokenizer.json" if given.is_dir() else given
    if file.resolve().parts[1:2] in (("proc",), ("sys",)):  # reading one may never end
        raise UserError(f"tokenizer.path={path} belongs to the system and is no tokenizer; give another file.")
    if not file.is_file():
        raise UserError(f"tokenizer.path={path}: no tokenizer.json there. Give such a file or a folder holding one.")
    return file


def is_saved(folder: Path) -> bool:
    """Whether a folder was written by `Tokenizer.save`."""
    return (folder / DESCRIPTION).is_file()


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Restore a tokenizer saved by `Tokenizer.save`, or open a folder or file with a standard tokenizer.json."""
    from polarlm.data.bpe import SubwordTokenizer

    folder = Path(folder)
    if not is_saved(folder):
        return SubwordTokenizer.from_file(folder)
    makers: dict[str, Callable[[dict[str, Any]], Tokenizer]] = {
        "byte": lambda saved: ByteTokenizer(),
        "char": lambda saved: CharTokenizer(saved["alphabet"]),
        "word": lambda saved: WordTokenizer(saved["words"]),
        "bpe": lambda saved: SubwordTokenizer.from_file(folder, eos=saved["eos"]),
    }
    try:
        saved = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
        return makers[saved["kind"]](saved)
    except UserError as error:
        raise error if str(folder) in str(error) else UserError(f"{folder / DESCRIPTION}: {error}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{folder / DESCRIPTION} is damaged ({type(error).__name__}: {error}).") from None


def standard_bytes(tokenizer: ByteTokenizer, eos: str) -> str:
    """A byte-level BPE without merges is a byte tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from polarlm.data.bpe import unicode_to_byte

    library = Tokenizer(models.BPE(dict(unicode_to_byte()), []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([eos])
    assert library.token_to_id(eos) == tokenizer.eos_id
    return library.to_str()


def standard_characters(tokenizer: CharTokenizer) -> str:
    """Every character is a word."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    library = Tokenizer(models.WordLevel({c: i for i, c in enumerate(tokenizer.alphabet)}, unk_token=""))
    library.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    library.decoder = decoders.Fuse()
    return library.to_str()


def standard_words(tokenizer: WordTokenizer) -> str:
    """White-space words, line ends as `<eos>`."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    library = Tokenizer(models.WordLevel({w: i for i, w in enumerate(tokenizer.words)}, unk_token="<unk>"))
    library.normalizer = normalizers.Replace("\n", " <eos> ")
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return library.to_str()


@dataclass(frozen=True)
class TokenizerConfig:
    """One tokenizer: bytes, characters, words, a BPE trained here, or an existing one from a file or the hub."""

    kind: str = setting("bpe", choices=KINDS)
    vocab_size: int | None = setting(None, at_least=3, at_most=10_000_000)
    min_frequency: int = setting(2, at_least=1)
    special_tokens: tuple[str, ...] = (EOS,)
    train_bytes: int = setting(200_000_000, at_least=1)
    path: str | None = None
    local: str | None = None
    hub: str | None = None
    revision: str | None = None
    eos: str | None = None

    def identity(self) -> dict[str, Any]:
        """What decides the ids, given the corpus."""
        if self.kind in ("byte", "char"):
            return {"kind": self.kind}
        if self.kind in ("file", "hub"):
            return {
                "kind": "file",
                "sha256": hashlib.sha256(_tokenizer_json(self).read_bytes()).hexdigest(),
                "eos": self.eos,
            }
        return json.loads(json.dumps(asdict(self)))


def read_tokenizer_config(given: Mapping[str, Any]) -> TokenizerConfig:
    """Check the plain mapping of a tokenizer yaml."""
    config = read_settings(TokenizerConfig, given, "tokenizer")
    if config.kind == "bpe" and config.vocab_size is None:
        raise UserError("tokenizer.vocab_size is missing; a trained BPE needs one, for example 2048.")
    return config


def make_tokenizer(config: TokenizerConfig, texts: Callable[[bool], Iterator[str]]) -> Tokenizer:
    """Build the tokenizer; `texts(train_only)` gives the corpus to those that learn from it."""
    if config.kind == "byte":
        return ByteTokenizer()
    if config.kind == "char":
        # The alphabet of all splits: a character that only occurs in val would otherwise have no id.
        return CharTokenizer.train(texts(False))
    if config.kind == "word":
        return WordTokenizer.train(texts(True), config.vocab_size, config.min_frequency)
    from polarlm.data.bpe import SubwordTokenizer

    if config.kind == "bpe":
        assert config.vocab_size is not None
        learned_from = _first_bytes(texts(True), config.train_bytes)
        return SubwordTokenizer.train(learned_from, config.vocab_size, config.min_frequency, config.special_tokens)
    file = _tokenizer_json(config)
    return load_tokenizer(file.parent) if is_saved(file.parent) else SubwordTokenizer.from_file(file, config.eos)


def _first_bytes(texts: Iterator[str], limit: int) -> Iterator[str]:
    seen = 0
    for text in texts:
        yield text
        seen += len(text.encode())
        if seen >= limit:
            return


def _tokenizer_json(config: TokenizerConfig) -> Path:
    if config.path is not None:
        return tokenizer_file(config.path)
    from polarlm.data.hub import hub_tokenizer

    return hub_tokenizer(config)
