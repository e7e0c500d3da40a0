"""Text to ids and back: one small interface, and the tokenizers that need no library (bytes, characters, words)."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polarlm.data.atomic import write_beside, write_sorted_json
from polarlm.data.tokenizers.standard import standard_bytes, standard_characters, standard_words
from polarlm.errors import UserError

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
    given = Path(path).expanduser()
    file = given / "tokenizer.json" if given.is_dir() else given
    if not file.is_file():
        raise UserError(f"tokenizer.path={path}: no tokenizer.json there. Give such a file or a folder holding one.")
    return file


def is_saved(folder: Path) -> bool:
    """Whether a folder was written by `Tokenizer.save`."""
    return (folder / DESCRIPTION).is_file()


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Restore a tokenizer saved by `Tokenizer.save`, or open a folder or file with a standard tokenizer.json."""
    from polarlm.data.tokenizers.bpe import SubwordTokenizer

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
