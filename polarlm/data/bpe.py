"""Sub-word tokenizers: trained or read with `tokenizers`, bulk-encoded by tiktoken from the very same vocabulary."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polarlm.data.atomic import write_beside, write_sorted_json
from polarlm.data.tokenizer import DESCRIPTION, EOS, Tokenizer, tokenizer_file
from polarlm.errors import UserError

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
