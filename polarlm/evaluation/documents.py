"""Losses of every document: what two checkpoints are compared by, document against document."""

from __future__ import annotations

import numpy as np

from polarlm.data import Tokenizer
from polarlm.evaluation.scores import Scores
from polarlm.evaluation.text import Text
from polarlm.evaluation.text_size import decoded_text


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
