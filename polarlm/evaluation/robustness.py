"""Robustness: longer windows than in training, corrupted input tokens, documents with shuffled tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from polarlm.errors import UserError
from polarlm.evaluation.breakdowns import loss_by_position
from polarlm.evaluation.metrics import measure
from polarlm.evaluation.scores import Text, WindowBatch, score_batches, score_text, window_batches
from polarlm.ignored import IGNORED
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


KINDS = ("random", "shuffled", "repeated")


def corruption(kind: str, rate: float, text: Text, seed: int) -> Callable[[np.ndarray], np.ndarray]:
    """A function that corrupts the tokens of one window after the other, the same for every model."""
    if kind not in KINDS or not 0 <= rate <= 1:
        raise UserError(f"corruption={kind}, rate={rate}: choose one of {', '.join(KINDS)} and a rate from 0 to 1")
    chance = np.random.default_rng([seed, KINDS.index(kind), round(rate * 1e6)])

    def corrupt(tokens: np.ndarray) -> np.ndarray:
        chosen = np.flatnonzero(chance.random(len(tokens)) < rate)
        changed = tokens.copy()
        if kind == "random":
            changed[chosen] = text.tokens[chance.integers(len(text.tokens), size=len(chosen))]
        elif kind == "shuffled":
            changed[chosen] = tokens[chance.permutation(chosen)]
        else:
            chosen = chosen[chosen > 0]
            changed[chosen] = tokens[chosen - 1]
        return changed

    return corrupt


def loss_by_corruption(
    model: GPT,
    text: Text,
    kinds: Sequence[str],
    rates: Sequence[float],
    *,
    seed: int = 0,
    mask_documents: bool = False,
) -> dict[str, Any]:
    """Loss for every kind and rate, over all targets and over those whose own last token was left as it is.

    The second tells what wrong *context* costs: a target right after a wrong token is hard for every model.
    """
    columns: dict[str, Any] = {"rate": [float(rate) for rate in rates]}
    context = model.config.context
    for kind in kinds:
        losses, clean = [], []
        for rate in rates:
            kept: list[np.ndarray] = []  # per window: which positions still hold the text's own token
            batches = window_batches(
                text, context, context, mask_documents=mask_documents, corrupt=corruption(kind, rate, text, seed)
            )
            scores = score_batches(model, (_note_clean(batch, text, kept) for batch in batches))
            untouched = np.concatenate(kept)
            losses.append(float(scores.nats.mean()))
            clean.append(float(scores.nats[untouched].mean()) if untouched.any() else None)
        columns[kind] = {"loss": losses, "loss_after_clean_token": clean}
    return columns


def _note_clean(batch: WindowBatch, text: Text, kept: list[np.ndarray]) -> WindowBatch:
    counted = (batch.targets != IGNORED).numpy()
    kept.append(batch.tokens.numpy()[counted] == text.tokens[batch.places[counted] - 1])
    return batch


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
