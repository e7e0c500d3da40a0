"""Where a loss comes from: by how much was read before a token, by how rare the token is, document by document."""

from __future__ import annotations

from typing import Any

import numpy as np

from polarlm.data import Tokenizer
from polarlm.evaluation.scores import Scores
from polarlm.evaluation.text import Text, decoded_text


def position_edges(longest: int) -> np.ndarray:
    """Bin edges 1, 2, 3, 4, 6, 8, 12, 16, … up to longest + 1: single positions first, then ever wider bins.

    The last position never stands alone: contexts are powers of two, and a bin of one position is mostly noise.
    """
    steps = {2, 3} | {2**n for n in range(2, 40)} | {3 * 2**n for n in range(1, 40)}
    return np.array([1, *sorted(edge for edge in steps if edge < longest), longest + 1])


def loss_by_position(scores: Scores, longest: int) -> dict[str, Any]:
    """Mean loss of the tokens with so many tokens before them; empty bins are left out."""
    edges = position_edges(longest)
    bins = np.searchsorted(edges, scores.seen, side="right") - 1
    count = np.bincount(bins, minlength=len(edges) - 1)
    nats = np.bincount(bins, scores.nats, minlength=len(edges) - 1)
    kept = count > 0
    return {
        "from": edges[:-1][kept].tolist(),
        "to": (edges[1:] - 1)[kept].tolist(),
        "loss": (nats[kept] / count[kept]).tolist(),
        "targets": count[kept].tolist(),
    }


def loss_by_frequency(scores: Scores, counts: np.ndarray) -> dict[str, Any]:
    """Mean loss per decade of the target's count in the training text (never, 1–9, 10–99, …); empty ones left out."""
    seen = counts[scores.targets]
    decade = np.where(seen > 0, np.floor(np.log10(np.maximum(seen, 1))).astype(int) + 1, 0)
    columns: dict[str, Any] = {"from": [], "to": [], "loss": [], "accuracy": [], "targets": []}
    for number in np.unique(decade).tolist():
        inside = decade == number
        columns["from"].append(10 ** (number - 1) if number else 0)
        columns["to"].append(10**number - 1 if number else 0)
        columns["loss"].append(float(scores.nats[inside].mean()))
        columns["accuracy"].append(float(scores.correct[inside].mean()))
        columns["targets"].append(int(inside.sum()))
    return columns


def losses_of_documents(scores: Scores, text: Text, tokenizer: Tokenizer) -> dict[str, np.ndarray]:
    """Per document: summed nats, scored targets, hits, tokens, bytes; compact enough to be kept for every run."""
    documents = len(text.starts)
    number = text.document_of(scores.places)
    ends = np.append(text.starts[1:], len(text.tokens))
    documents_text = (decoded_text(text.tokens[begin:end], tokenizer) for begin, end in zip(text.starts, ends))
    return {
        "nats": np.bincount(number, scores.nats, minlength=documents),
        "targets": np.bincount(number, minlength=documents).astype(np.int32),
        "correct": np.bincount(number, scores.correct, minlength=documents).astype(np.int32),
        "tokens": (ends - text.starts).astype(np.int32),
        "bytes": np.array([len(one.encode()) for one in documents_text], np.int32),
    }
