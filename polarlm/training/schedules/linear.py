"""Warm-up, then a straight line down to final_factor (zero by default) at the last token."""

from __future__ import annotations

from dataclasses import dataclass

from polarlm.training.schedules.warmup import Schedule, require_factor


@dataclass(frozen=True)
class Linear(Schedule):
    """From 1 to `final_factor` in a straight line."""

    final_factor: float = 0.0

    def check(self, total: int) -> None:
        """Also the final factor."""
        super().check(total)
        require_factor(self.final_factor)

    def after_warmup(self, tokens: int, warmup: float, total: int) -> float:
        """The share of the way that is left."""
        left = max(0.0, total - tokens) / max(1.0, total - warmup)
        return self.final_factor + (1 - self.final_factor) * min(1.0, left)
