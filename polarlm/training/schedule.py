"""Learning-rate schedules, counted in tokens: the same curve whatever the batch size or device count."""

from __future__ import annotations

import math
from collections.abc import Callable

from polarlm.errors import UserError

KINDS = ("cosine", "wsd", "constant")


def learning_rate_factor(
    kind: str,
    total_tokens: int,
    *,
    warmup_fraction: float = 0.05,
    warmup_tokens: int | None = None,
    decay_fraction: float = 0.2,
    final_factor: float = 0.1,
) -> Callable[[int], float]:
    """The factor on the peak learning rate after `tokens` tokens have been seen."""
    if kind not in KINDS:
        raise UserError(f"schedule.kind={kind!r} is unknown; choose one of {', '.join(KINDS)}")
    if total_tokens <= 0:
        raise UserError(f"The run has {total_tokens} tokens; set trainer.max_steps or trainer.max_tokens above 0")
    warmup = warmup_tokens if warmup_tokens is not None else warmup_fraction * total_tokens
    if not 0 <= warmup <= total_tokens:
        raise UserError(f"The warm-up ({warmup:.0f} tokens) must lie between 0 and the run's {total_tokens} tokens")
    decay = decay_fraction * total_tokens
    if kind == "wsd" and warmup + decay > total_tokens:
        raise UserError(
            f"Warm-up ({warmup:.0f}) plus decay ({decay:.0f}) exceed the run's {total_tokens} tokens; "
            "lower schedule.warmup_fraction or schedule.decay_fraction"
        )

    def factor(tokens: int) -> float:
        if tokens < warmup:
            return tokens / warmup
        if kind == "constant":
            return 1.0
        if kind == "cosine":
            progress = min(1.0, (tokens - warmup) / max(1.0, total_tokens - warmup))
            return final_factor + (1 - final_factor) * 0.5 * (1 + math.cos(math.pi * progress))
        left = max(0.0, total_tokens - tokens)
        return 1.0 if left >= decay else final_factor + (1 - final_factor) * left / decay

    return factor
