"""BLiMP: of two sentences that differ in one point of grammar, is the right one more likely? A tie is wrong."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from polarlm.data import Tokenizer
from polarlm.evaluation.downstream.continuations import encode_pair, likelihoods
from polarlm.model import GPT

LOCAL = "blimp_dev.jsonl.xz"


def blimp(model: GPT, tokenizer: Tokenizer, rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Accuracy over all pairs, over the paradigms' means, and of every paradigm."""
    pairs = list(rows)
    sentences = [row[key] for row in pairs for key in ("sentence_good", "sentence_bad")]
    scored = likelihoods(model, [encode_pair(tokenizer, "", sentence) for sentence in sentences])
    right = np.array([good.nats > bad.nats for good, bad in zip(scored[::2], scored[1::2])])
    paradigm = np.array([row["UID"] for row in pairs])
    each = {name: float(right[paradigm == name].mean()) for name in np.unique(paradigm).tolist()}
    return {
        "pairs": len(pairs),
        "accuracy": float(right.mean()),
        "accuracy_of_paradigms": float(np.mean(list(each.values()))),
        "paradigms": {"paradigm": list(each), "accuracy": list(each.values())},
    }
