"""Warm-up, then a straight line down to final_factor (zero by default) at the last token."""

from __future__ import annotations

from dataclasses import dataclass

from polarlm.training.schedules.warmup import Decay


@dataclass(frozen=True)
class Linear(Decay):
    """From 1 to `final_factor` in a straight line."""

    def after_warmup(self, tokens: int, warmup: float, total: int) -> float:
        """The share of the way that is left."""
        left = max(0.0, total - tokens) / max(1.0, total - warmup)
        return self.down(min(1.0, left))
