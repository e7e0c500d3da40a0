"""What a tokenizer yaml may say, and how each kind is made."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from polarlm.data.tokenizers.tokenizer import (
    EOS,
    KINDS,
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
    WordTokenizer,
    is_saved,
    load_tokenizer,
    tokenizer_file,
)
from polarlm.errors import UserError
from polarlm.settings import read_settings, setting


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
    from polarlm.data.tokenizers.bpe import SubwordTokenizer

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
    from polarlm.data.read.locate import hub_tokenizer

    return hub_tokenizer(config)
