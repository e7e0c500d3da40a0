"""Small made-up corpora for the data room's tests."""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polarlm.data import Corpus, build_corpus

TEXT = "the cat sat on a mat while seven grey owls watched it's 42 o'clock, said Ann; naïve café – über 北京 \n"
WORDS = [word for word in re.split(" ", TEXT) if word]


def made_up_documents(count: int, seed: int = 0, longest: int = 120) -> list[str]:
    """Different documents of words, punctuation, digits and letters beyond ASCII."""
    chance = random.Random(seed)
    bodies = (" ".join(chance.choices(WORDS, k=chance.randint(1, longest))) for _ in range(count))
    return [f"Document {number}. {body}" for number, body in enumerate(bodies)]


@pytest.fixture
def documents() -> list[str]:
    return made_up_documents(250)


@pytest.fixture
def folder_of(tmp_path: Path) -> Callable[[list[str]], Path]:
    """Writes documents as text files, one each, and returns their folder."""

    def write(texts: list[str]) -> Path:
        folder = tmp_path / "texts"
        folder.mkdir(exist_ok=True)
        for number, text in enumerate(texts):
            (folder / f"{number:06d}.txt").write_bytes(text.encode())
        return folder

    return write


@pytest.fixture
def corpus_of(tmp_path: Path) -> Callable[..., Corpus]:
    """Prepares documents as a corpus: corpus_of(texts, kind="byte", section_bytes=…, **data options)."""

    def build(texts: list[str], kind: str = "byte", section_bytes: int = 1 << 27, **options: Any) -> Corpus:
        folder = tmp_path / "texts"
        folder.mkdir(exist_ok=True)
        (folder / "all.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        data = {"path": str(folder), "split": {"rule": "hash", "val": 0.1, "test": 0.1}} | options
        tokenizer: dict[str, Any] = {"kind": kind} | ({"vocab_size": 300} if kind == "bpe" else {})
        return build_corpus(data, tokenizer, tmp_path / "cache", section_bytes=section_bytes)

    return build
