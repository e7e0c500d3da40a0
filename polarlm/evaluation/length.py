"""Trained at N tokens, read at 1, 2, 4, 8 N: does a model hold up beyond the length it has seen?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polarlm.evaluation.by_position import loss_by_position
from polarlm.evaluation.metrics import measure
from polarlm.evaluation.scores import score_text
from polarlm.evaluation.text import Text
from polarlm.model import GPT


def loss_by_length(model: GPT, text: Text, factors: Sequence[int], *, mask_documents: bool = False) -> dict[str, Any]:
    """Every metric, and the loss by position, in windows of each multiple of the trained context that the text fills.

    Windows do not overlap: the targets are the same at every length, only what may be read before them differs.
    """
    columns: dict[str, Any] = {"factor": [], "context": [], "metrics": [], "by_position": []}
    for factor in factors:
        context = factor * model.config.context
        if context > len(text.tokens) - 1 and columns["factor"]:
            break
        scores = score_text(model, text, context=context, mask_documents=mask_documents)
        columns["factor"].append(factor)
        columns["context"].append(context)
        columns["metrics"].append(measure(scores.tally(text)))
        columns["by_position"].append(loss_by_position(scores, context))
    return columns
