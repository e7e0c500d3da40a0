"""Text becomes tokens, tokens become batches: sources, tokenizers, token store, batches, Lightning data module."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polarlm.data.corpus import Corpus, build_corpus
    from polarlm.data.module import LMDataModule
    from polarlm.data.store import TokenStore
    from polarlm.data.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Corpus", "LMDataModule", "TokenStore", "Tokenizer", "build_corpus", "load_tokenizer"]

# Loaded when first asked for: checking a setting must not pay for numpy, nor reading tokens for Lightning.
_HOMES = {
    "Corpus": "corpus",
    "build_corpus": "corpus",
    "LMDataModule": "module",
    "TokenStore": "store",
    "Tokenizer": "tokenizer",
    "load_tokenizer": "tokenizer",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"polarlm.data.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
