"""A small real corpus and a small model for the evaluation tests."""

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from polarlm.attention import PolarAttention, StandardAttention
from polarlm.data import Corpus, build_corpus
from polarlm.model import GPT, GPTConfig

LINE = "the cat sat on a mat while seven grey owls watched; naïve café – über 北京 it's 42\n"
WORDS = re.split(" ", LINE)


def made_up_text(documents: int, seed: int = 0) -> str:
    """Paragraphs of words, some beyond ASCII, lengths from 1 to 60 words."""
    chance = random.Random(seed)
    return "\n\n".join(f"No. {n} " + " ".join(chance.choices(WORDS, k=chance.randint(1, 60))) for n in range(documents))


@pytest.fixture
def corpus_of(tmp_path: Path) -> Callable[..., Corpus]:
    """corpus_of(kind) prepares one text file of many documents with that tokenizer."""

    def build(kind: str = "byte", documents: int = 200, **options: Any) -> Corpus:
        path = tmp_path / "text.txt"
        path.write_text(made_up_text(documents), encoding="utf-8")
        data = {"path": str(path), "document_separator": "\n\n", "split": {"rule": "hash", "val": 0.3}} | options
        tokenizer: dict[str, Any] = {"kind": kind} | ({"vocab_size": 300} if kind == "bpe" else {})
        return build_corpus(data, tokenizer, tmp_path / "cache")

    return build


@pytest.fixture(params=["standard", "polar"])
def model_of(request: pytest.FixtureRequest) -> Callable[..., GPT]:
    """model_of(vocabulary) builds a tiny model of the block under test, with weights large enough to have opinions."""
    mixer = {"standard": StandardAttention, "polar": PolarAttention}[request.param]

    def build(vocabulary: int, context: int = 16, **options: Any) -> GPT:
        torch.manual_seed(1)
        model = GPT(
            GPTConfig(vocab_size=vocabulary, context=context, d_model=16, n_layer=2, n_head=2, **options), mixer
        )
        with torch.no_grad():
            model.embedding.weight.normal_(std=0.5)
        return model.eval()

    return build
