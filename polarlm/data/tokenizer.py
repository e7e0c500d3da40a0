"""Tokenizers: bytes, characters, words and sub-words, what a tokenizer yaml may say, and how each kind is made."""

from __future__ import annotations

import contextlib
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


# -- sub-words: trained or read with `tokenizers`, encoded in bulk by tiktoken from the very same vocabulary -----------


# GPT-2's pre-tokeniser: contractions, words, numbers and punctuation with their leading space, runs of white space.
# Possessive quantifiers (++) only forbid useless backtracking; the matches are the same.
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
_PROBE = (
    "Hello, world! It's 3.14159 o'clock;\n\n  we'll\tsee…\r\n naïve café 北京 \U0001f600 don't\u00a0stop   \n\n\n"
    "  def f(x):\n        return x**2 # ½ ≥ \u0000 \u200b end  "
)
_ENDS = (EOS, "</s>", "<eos>", "<|end_of_text|>", "<|im_end|>", "[SEP]")


class SubwordTokenizer(Tokenizer):
    """Any tokenizer.json; a byte-level BPE among them is encoded by tiktoken (same ids, about ten times faster)."""

    kind = "bpe"

    def __init__(self, serialised: str, eos: str | None = None):
        from tokenizers import Tokenizer as Library

        self._serialised = serialised
        self._library = Library.from_str(serialised)
        self._library.encode_special_tokens = True  # "<|endoftext|>" inside a document is text, not a border
        self._library.no_truncation()
        self._library.no_padding()
        vocabulary = self._library.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise UserError("this tokenizer has no tokens; use another tokenizer.json or tokenizer=bpe.")
        if len(set(vocabulary.values())) < len(vocabulary):
            raise UserError(
                "this tokenizer gives one id to several tokens; use another tokenizer.json or tokenizer=bpe."
            )
        self.vocab_size = max(vocabulary.values()) + 1
        if self.vocab_size > 2 * len(vocabulary) + 1024:  # a model has one embedding per id, used or not
            raise UserError(
                f"this tokenizer has {len(vocabulary):,} tokens with ids up to {self.vocab_size - 1:,}; ids must be "
                "numbered without large gaps. Use another tokenizer.json or tokenizer=bpe."
            )
        self.eos = eos or next((t for t in _ENDS if self._library.token_to_id(t) is not None), None)
        self.eos_id = self._library.token_to_id(self.eos) if self.eos else None
        if eos and self.eos_id is None:
            raise UserError(
                f"tokenizer.eos={eos!r} is not a token of this tokenizer; leave it out or name one of its tokens."
            )
        unknown = json.loads(serialised)["model"].get("unk_token")
        self.unknown_id = self._library.token_to_id(unknown) if unknown else None
        self._fast = self._build_fast()
        self.splittable = self._fast is not None

    @classmethod
    def train(
        cls, texts: Iterable[str], vocab_size: int, min_frequency: int = 2, special_tokens: Sequence[str] = (EOS,)
    ) -> SubwordTokenizer:
        """Learn a byte-level BPE; every byte is in its alphabet, so no text is unknown to it."""
        from tokenizers import Tokenizer as Library
        from tokenizers import decoders, models, pre_tokenizers, trainers

        if vocab_size < 256 + len(special_tokens):
            raise UserError(
                f"tokenizer.vocab_size={vocab_size} is too small: 256 bytes and {len(special_tokens)} special tokens "
                f"need {256 + len(special_tokens)}; use tokenizer=byte for bytes alone."
            )
        library = Library(models.BPE())
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, min_frequency=min_frequency, special_tokens=list(special_tokens),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False,
        )  # fmt: skip
        library.train_from_iterator(texts, trainer)
        return cls(library.to_str(), eos=special_tokens[0] if special_tokens else None)

    @classmethod
    def from_file(cls, path: str | Path, eos: str | None = None) -> SubwordTokenizer:
        """Open a tokenizer.json, or a folder that holds one."""
        file = tokenizer_file(path)
        try:
            return cls(file.read_text(encoding="utf-8"), eos)
        except UserError as error:
            raise UserError(f"{file}: {error}") from None
        except Exception as error:  # the library raises bare Exception for anything it cannot parse
            raise UserError(f"{file} is not a readable tokenizer.json: {error}") from None

    def encode_array(self, text: str) -> np.ndarray:
        if self._fast is None:
            return self._checked(text, np.array(self._encoded([text])[0].ids, np.uint32))
        return self._fast.encode_to_numpy(text, disallowed_special=())

    def _encoded(self, texts: Sequence[str]) -> list[Any]:
        with _without_panic():
            return self._library.encode_batch_fast(list(texts), add_special_tokens=False)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        if self._fast is not None:
            return [self.encode_array(text) for text in texts]
        encodings = self._encoded(texts)
        return [self._checked(text, np.array(one.ids, np.uint32)) for text, one in zip(texts, encodings)]

    def encode_slowly(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids by the `tokenizers` library itself: the reference the fast path must equal."""
        return [one.ids for one in self._encoded(texts)]

    def decode(self, ids: Sequence[int]) -> str:
        return self._library.decode([int(i) for i in ids], skip_special_tokens=False)

    def description(self) -> dict[str, Any]:
        return {"kind": "bpe", "eos": self.eos, "model": json.loads(self._serialised)}

    def standard(self) -> str:
        return self._serialised

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer.json it was made from, and beside it which token ends a text."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_beside(folder / "tokenizer.json", self._serialised.encode())
        write_sorted_json(folder / DESCRIPTION, {"kind": "bpe", "eos": self.eos})

    def _checked(self, text: str, ids: np.ndarray) -> np.ndarray:
        # A BPE without all bytes and without an unknown token drops what it does not know: refuse to train on holes.
        if self.unknown_id is None and text.strip() and not _covers(self.decode(ids.tolist()), text):
            sample = next((c for c in text if not c.isspace() and not self.encode_slowly([c])[0]), text[:20])
            raise UserError(
                f"This tokenizer drops text it does not know (for example {sample!r}) and has no unknown token; "
                "use tokenizer=bpe, byte, or a tokenizer.json with all bytes in its alphabet."
            )
        return ids

    def _build_fast(self) -> Any:
        model = json.loads(self._serialised)
        pattern = _fast_pattern(model)
        if pattern is None:
            return None
        import tiktoken

        to_byte = unicode_to_byte()
        added = {token["content"] for token in model["added_tokens"]}
        try:
            ranks = {bytes(to_byte[c] for c in t): i for t, i in model["model"]["vocab"].items() if t not in added}
        except KeyError:
            return None
        if not {bytes([b]) for b in range(256)} <= ranks.keys():
            return None
        # Special tokens are never allowed: in a document they are ordinary text. One must be named all the same, since
        # tiktoken searches for the empty expression otherwise and takes twice as long.
        special = {self.eos or EOS: self.vocab_size}
        fast = tiktoken.Encoding("polarlm", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
        same = fast.encode_ordinary(_PROBE) == self._encoded([_PROBE])[0].ids
        return fast if same else None


@contextlib.contextmanager
def _without_panic() -> Iterator[None]:
    """A regular expression that backtracks for ever is given up by the library in a way that no `except` expects."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise UserError(
            f"this tokenizer can't encode the text ({' '.join(str(error).split())[:200]}); use another tokenizer."
        ) from None


def _covers(decoded: str, text: str) -> bool:
    def visible(s: str) -> str:
        return "".join(s.split())

    return len(visible(decoded)) >= len(visible(text))


def _fast_pattern(model: dict[str, Any]) -> str | None:
    """The regular expression tiktoken needs, where a tokenizer.json is a plain byte-level BPE; otherwise None."""
    inner, pre = model["model"], model.get("pre_tokenizer") or {}
    if inner.get("type") != "BPE" or model.get("normalizer") or inner.get("dropout") or inner.get("byte_fallback"):
        return None
    if pre.get("type") == "ByteLevel" and pre.get("use_regex", True) and not pre.get("add_prefix_space"):
        return _GPT2
    if pre.get("type") == "Sequence" and len(pre["pretokenizers"]) == 2:
        split, level = pre["pretokenizers"]
        plain = (
            level.get("type") == "ByteLevel" and not level.get("use_regex", True) and not level.get("add_prefix_space")
        )
        if plain and split.get("type") == "Split" and split["behavior"] == "Isolated" and not split["invert"]:
            return split["pattern"].get("Regex")
    return None


def unicode_to_byte() -> dict[str, int]:
    """GPT-2's way of writing bytes as printable characters."""
    # Printable bytes stand for themselves, the others are moved up to code point 256 and beyond.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(moved)}
