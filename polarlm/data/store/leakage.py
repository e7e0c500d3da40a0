"""Does an evaluation split repeat what training has seen? Exact duplicates of documents and paragraphs, by hash."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from polarlm.data.read.documents import Piece
from polarlm.data.read.splits import document_key

MIN_CHARS = 64  # shorter paragraphs (headings, "Yes.") repeat without anything having leaked


def paragraphs(text: str) -> Iterable[str]:
    """Blocks between blank lines; in text whose lines are not wrapped, every line is a paragraph."""
    for block in text.split("\n\n"):
        if len(block) < MIN_CHARS:
            continue
        lines = block.split("\n")
        for paragraph in lines if len(lines) > 1 and max(map(len, lines)) > 120 else (block,):
            paragraph = paragraph.strip()
            if len(paragraph) >= MIN_CHARS:
                yield paragraph


def piece_hashes(pieces: Iterable[Piece]) -> tuple[np.ndarray, np.ndarray]:
    """(document hashes, paragraph hashes) of some pieces, 64 bits each."""
    documents: list[int] = []
    blocks: list[bytes] = []
    for piece in pieces:
        if piece.first and not piece.text.isspace():
            documents.append(document_key(piece.text))
        blocks.extend(hashlib.blake2b(p.encode(), digest_size=8).digest() for p in paragraphs(piece.text))
    return np.array(documents, "<u8"), np.frombuffer(b"".join(blocks), "<u8")


def leakage_report(folder: Path, sections: int) -> dict[str, Any]:
    """For every evaluation split: how many of its documents and paragraphs occur verbatim in the train split."""
    report: dict[str, Any] = {}
    for split in ("val", "test"):
        for what in ("documents", "paragraphs"):
            wanted = np.concatenate([_load(folder, split, what, n) for n in range(sections)] or [np.empty(0, "<u8")])
            if len(wanted) == 0:
                continue
            unique, counts = np.unique(wanted, return_counts=True)
            hit = np.zeros(len(unique), bool)
            # One section of train at a time: memory follows the evaluation split, not the corpus.
            for number in range(sections):
                hit |= np.isin(unique, _load(folder, "train", what, number))
            entry = report.setdefault(split, {})
            entry[what] = {"checked": len(wanted), "in_train": int(counts[hit].sum())}
    return report


def hash_file(folder: Path, split: str, what: str, section: int) -> Path:
    """Where the hashes of one section wait until the whole corpus is built."""
    return folder / f"{split}-{section:05d}.{what}.hashes"


def _load(folder: Path, split: str, what: str, section: int) -> np.ndarray:
    path = hash_file(folder, split, what, section)
    return np.fromfile(path, "<u8") if path.exists() else np.empty(0, "<u8")
