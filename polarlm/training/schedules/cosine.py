"""Warm-up, then a cosine down to final_factor."""

from __future__ import annotations

import math
from dataclasses import dataclass

from polarlm.training.schedules.warmup import Decay


@dataclass(frozen=True)
class Cosine(Decay):
    """Half a cosine from 1 to `final_factor`."""

    final_factor: float = 0.1

    def after_warmup(self, tokens: int, warmup: float, total: int) -> float:
        """final + (1 − final) (1 + cos π p)/2 with p from 0 to 1."""
        progress = min(1.0, (tokens - warmup) / max(1.0, total - warmup))
        return self.down(0.5 * (1 + math.cos(math.pi * progress)))
