"""Sliding windows of any stride: every token but the first is a target once, with as much context as was asked for.

A window holds `context` tokens; the next begins `stride` tokens later and scores only what the one before could not
reach. So every target has at least context − stride tokens before it (at the beginning of the text: all there are).
stride = context are windows that do not overlap; stride = 1 gives every token the longest possible context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from polarlm.errors import UserError
from polarlm.evaluation.text import Text
from polarlm.ignored import IGNORED

BATCH_TOKENS = 8192  # read at a time: enough to keep a CPU or a GPU busy, little enough for long contexts


@dataclass(frozen=True)
class WindowBatch:
    """Windows (B, T) with the targets each of them scores (−100 elsewhere) and the targets' places in the text."""

    tokens: torch.Tensor
    targets: torch.Tensor
    documents: torch.Tensor | None
    places: np.ndarray  # (B, T)


def window_spans(length: int, context: int, stride: int) -> list[tuple[int, int, int]]:
    """(begin, first target, end) of every window: it reads tokens [begin, end − 1) and scores [first target, end)."""
    if not 1 <= stride <= context:
        raise UserError(f"stride={stride} must be between 1 and the context ({context})")
    spans, scored, begin = [], 1, 0
    while scored < length:
        end = min(begin + context + 1, length)
        spans.append((begin, scored, end))
        scored, begin = end, begin + stride
    return spans


def window_batches(
    text: Text,
    context: int,
    stride: int,
    *,
    mask_documents: bool = False,
    corrupt: Callable[[np.ndarray], np.ndarray] | None = None,
) -> Iterator[WindowBatch]:
    """All windows of a text in order; `corrupt` changes what is read (tokens of one window), never what is scored."""
    spans = window_spans(len(text.tokens), context, stride)
    rows = max(1, BATCH_TOKENS // context)
    for first in range(0, len(spans), rows):
        group = spans[first : first + rows]
        tokens = np.zeros((len(group), context), np.int64)
        targets = np.full((len(group), context), IGNORED, np.int64)
        documents = np.zeros((len(group), context), np.int64) if mask_documents else None
        places = np.zeros((len(group), context), np.int64)
        for row, (begin, scored, end) in enumerate(group):
            size = end - 1 - begin
            read = text.tokens[begin : end - 1]
            tokens[row, :size] = corrupt(read) if corrupt else read
            places[row, :size] = np.arange(begin + 1, end)
            targets[row, scored - begin - 1 : size] = text.tokens[scored:end]
            if documents is not None:
                ids = text.document_of(np.arange(begin, end))
                documents[row, :size] = ids[:-1]
                targets[row, :size][ids[1:] != ids[:-1]] = IGNORED  # nothing in its own document comes before it
        yield WindowBatch(
            torch.from_numpy(tokens),
            torch.from_numpy(targets),
            None if documents is None else torch.from_numpy(documents),
            places,
        )
