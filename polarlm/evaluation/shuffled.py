"""Negative control: a text whose words stand in random order must cost a model all it gained over counting pairs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from polarlm.evaluation.scores import score_text
from polarlm.evaluation.text import Text
from polarlm.model import GPT


def shuffled_documents(text: Text, seed: int = 0) -> Text:
    """The same documents with the tokens of each in random order."""
    chance = np.random.default_rng(seed)
    tokens = text.tokens.copy()
    for begin, end in zip(text.starts, [*text.starts[1:], len(tokens)]):
        chance.shuffle(tokens[begin:end])
    return replace(text, tokens=tokens)


def shuffling_control(
    model: GPT, text: Text, bigram_loss: float, *, seed: int = 0, mask_documents: bool = False
) -> dict[str, Any]:
    """Loss on the text and on its shuffled documents beside the bigram's on the text; passed if the gain is gone."""
    ordered = float(score_text(model, text, mask_documents=mask_documents).nats.mean())
    mixed = float(score_text(model, shuffled_documents(text, seed), mask_documents=mask_documents).nats.mean())
    return {
        "loss": ordered,
        "loss_shuffled": mixed,
        "loss_bigram": bigram_loss,
        "gain_over_bigram": bigram_loss - ordered,
        "gain_over_bigram_shuffled": bigram_loss - mixed,
        "passed": mixed >= bigram_loss,
    }
