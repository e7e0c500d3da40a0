"""Checks of the user's own text and tokenizer that are cheap enough to make before torch is loaded."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Mapping
from typing import Any

from polarlm.data.config import read_data_config
from polarlm.data.corpus import build_corpus
from polarlm.data.order import require_length
from polarlm.data.readers import find_files
from polarlm.data.tokenizer import make_tokenizer, read_tokenizer_config

PLAIN = ("", ".txt", ".md", ".json", ".jsonl", ".csv", ".tsv")  # read without a heavy library
IN_DOUBT = 64  # bytes per token of the context; a longer text fills it in any reasonable split


def require_tokenizer(tokenizer: Mapping[str, Any]) -> None:
    """Refuse a tokenizer file that can't be used."""
    config = read_tokenizer_config(tokenizer)
    if config.kind == "file" and config.path is not None:
        make_tokenizer(config, lambda train_only: iter(()))


def require_enough_text(data: Mapping[str, Any], tokenizer: Mapping[str, Any], context: int) -> None:
    """Refuse a short text whose train split has fewer tokens than one context; longer texts are not read here.

    The text is prepared in a temporary folder, so a refused one leaves nothing in the cache.
    """
    config, tokens = read_data_config(data), read_tokenizer_config(tokenizer)
    if config.path is None or config.source == "mixture" or config.streaming or config.packing != "stream":
        return
    files = find_files(config.path)
    small = sum(file.stat().st_size for file in files) <= IN_DOUBT * (context + 1)
    if not small or tokens.kind == "hub" or any(file.suffix not in PLAIN for file in files):
        return
    with tempfile.TemporaryDirectory() as cache, contextlib.redirect_stderr(io.StringIO()):
        require_length(build_corpus(data, tokenizer, cache).store("train"), context)
