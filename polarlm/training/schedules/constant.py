"""Warm-up, then constant."""

from __future__ import annotations

from dataclasses import dataclass

from polarlm.training.schedules.warmup import Schedule


@dataclass(frozen=True)
class Constant(Schedule):
    """The peak until the end."""

    def after_warmup(self, tokens: int, warmup: float, total: int) -> float:
        """1."""
        return 1.0
