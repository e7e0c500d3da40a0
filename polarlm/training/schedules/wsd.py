"""Warm-up, stable plateau, then a decay over the last part of the tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

from polarlm.errors import UserError
from polarlm.training.schedules.warmup import Decay

SHAPES = ("linear", "sqrt")


@dataclass(frozen=True)
class WarmupStableDecay(Decay):
    """1 on the plateau; over the last `decay_fraction` of the tokens down to `final_factor`."""

    decay_fraction: float = 0.2
    shape: str = "linear"  # linear: a straight line; sqrt: 1 − √progress, steep first

    def check(self, total: int) -> None:
        """Also that warm-up and decay fit into the run."""
        super().check(total)
        if self.shape not in SHAPES:
            raise UserError(f"schedule.shape={self.shape!r} is unknown; choose one of {', '.join(SHAPES)}")
        if not 0 <= self.decay_fraction <= 1 or self.warmup(total) + self.decay_fraction * total > total * (1 + 1e-9):
            raise UserError(
                f"Warm-up ({self.warmup(total):.0f}) plus decay ({self.decay_fraction * total:.0f}) exceed the run's "
                f"{total} tokens; lower schedule.warmup_fraction or schedule.decay_fraction"
            )

    def after_warmup(self, tokens: int, warmup: float, total: int) -> float:
        """The plateau, then the share of the decay that is left."""
        decay = self.decay_fraction * total
        left = max(0.0, total - tokens)
        if left >= decay:
            return 1.0
        share = left / decay if self.shape == "linear" else 1 - math.sqrt(1 - left / decay)
        return self.down(share)
