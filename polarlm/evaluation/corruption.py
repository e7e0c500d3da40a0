"""Loss when part of what a model reads is wrong: the filter claims to be robust to outliers.

Only what is read is changed, never what is scored. `rate` of the positions of every window are corrupted:
random: another token, drawn as often as the text has it; shuffled: these positions exchange their tokens;
repeated: the token before it stands there again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from polarlm.errors import UserError
from polarlm.evaluation.scores import score_batches
from polarlm.evaluation.text import Text
from polarlm.evaluation.windows import WindowBatch, window_batches
from polarlm.ignored import IGNORED
from polarlm.model import GPT

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
