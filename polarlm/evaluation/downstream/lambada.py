"""LAMBADA: the last word of a passage that can only be guessed from the whole of it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from polarlm.data import Tokenizer
from polarlm.evaluation.downstream.continuations import encode_pair, likelihoods
from polarlm.model import GPT

LOCAL = "lambada/lambada_dev.jsonl"


def lambada(model: GPT, tokenizer: Tokenizer, rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Accuracy (the model itself would have written the word) and the word's mean log-likelihood and perplexity."""
    passages = [row["text"].rpartition(" ") for row in rows]
    scored = likelihoods(model, [encode_pair(tokenizer, before, f" {word}") for before, _, word in passages])
    nats = -sum(one.nats for one in scored) / len(scored)
    return {
        "passages": len(scored),
        "accuracy": sum(one.greedy for one in scored) / len(scored),
        "target_log_likelihood": -nats,
        "target_perplexity": math.exp(nats) if nats < 700 else math.inf,
    }
