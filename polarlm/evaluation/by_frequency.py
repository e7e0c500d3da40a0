"""Loss against how often a token occurred in the training text: who knows the rare words?"""

from __future__ import annotations

from typing import Any

import numpy as np

from polarlm.evaluation.scores import Scores


def token_counts(tokens: np.ndarray, vocabulary: int) -> np.ndarray:
    """How often every id occurs."""
    return np.bincount(tokens, minlength=vocabulary)


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
