"""Text becomes tokens, tokens become batches: sources, tokenizers, token store, batches, Lightning data module."""

from typing import Any

from polarlm.data.corpus import Corpus, build_corpus
from polarlm.data.store.tokens import TokenStore
from polarlm.data.tokenizers.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Corpus", "LMDataModule", "TokenStore", "Tokenizer", "build_corpus", "load_tokenizer"]


def __getattr__(name: str) -> Any:
    # Lightning takes seconds to import; a notebook that only reads tokens must not pay for it.
    if name == "LMDataModule":
        from polarlm.data.module import LMDataModule

        return LMDataModule
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
