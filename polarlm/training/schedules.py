"""Learning-rate schedules, counted in tokens: the same curve whatever the batch size or device count.

A yaml in configs/schedule names one of these classes; its other keys are the class's fields. All begin with a linear
warm-up from zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from polarlm.errors import UserError
from polarlm.targets import target_of

SHAPES = ("linear", "sqrt")


def build_schedule(schedule: dict[str, Any], total_tokens: int) -> Schedule:
    """The schedule that `schedule` names, checked against the length of the run."""
    build, options = target_of(schedule, "schedule", Schedule)
    try:
        built: Schedule = build(**options)
    except TypeError as error:
        raise UserError(f"schedule has an unknown setting: {error}") from error
    built.check(total_tokens)
    return built


@dataclass(frozen=True)
class Schedule:
    """The factor on the peak learning rate; a shape overrides `after_warmup`."""

    warmup_fraction: float = 0.05
    warmup_tokens: int | None = None

    def warmup(self, total: int) -> float:
        """Tokens of the warm-up in a run of `total` tokens."""
        return self.warmup_tokens if self.warmup_tokens is not None else self.warmup_fraction * total

    def check(self, total: int) -> None:
        """Raise an error for a run without tokens or a warm-up longer than the run."""
        if total <= 0:
            raise UserError(f"The run has {total} tokens; set trainer.max_steps or trainer.max_tokens above 0")
        if not 0 <= self.warmup(total) <= total:
            raise UserError(
                f"The warm-up ({self.warmup(total):.0f} tokens) must lie between 0 and the run's {total} tokens; "
                "change schedule.warmup_fraction or schedule.warmup_tokens"
            )

    def factor(self, tokens: int, total: int) -> float:
        """The factor after `tokens` of `total` tokens have been seen."""
        warmup = self.warmup(total)
        return tokens / warmup if tokens < warmup else self.after_warmup(tokens, warmup, total)

    def after_warmup(self, tokens: int, warmup: float, total: int) -> float:
        """The factor once the warm-up is over."""
        raise NotImplementedError


@dataclass(frozen=True)
class Decay(Schedule):
    """A schedule that ends at `final_factor` of the peak."""

    final_factor: float = 0.0

    def check(self, total: int) -> None:
        """Also that the final factor is a share of the peak."""
        super().check(total)
        if not 0 <= self.final_factor <= 1:
            raise UserError(f"schedule.final_factor={self.final_factor} must lie between 0 and 1")

    def down(self, left: float) -> float:
        """The factor during the decay: 1 at its beginning, the final factor at its end."""
        return self.final_factor + (1 - self.final_factor) * left


@dataclass(frozen=True)
class Constant(Schedule):
    """Warm-up, then the peak until the end."""

    def after_warmup(self, tokens: int, warmup: float, total: int) -> float:
        """1."""
        return 1.0


@dataclass(frozen=True)
class Linear(Decay):
    """Warm-up, then a straight line to `final_factor` at the last token."""

    def after_warmup(self, tokens: int, warmup: float, total: int) -> float:
        """The share of the way that is left."""
        left = max(0.0, total - tokens) / max(1.0, total - warmup)
        return self.down(min(1.0, left))


@dataclass(frozen=True)
class Cosine(Decay):
    """Warm-up, then half a cosine to `final_factor`."""

    final_factor: float = 0.1

    def after_warmup(self, tokens: int, warmup: float, total: int) -> float:
        """final + (1 − final) (1 + cos π p)/2 with p from 0 to 1."""
        progress = min(1.0, (tokens - warmup) / max(1.0, total - warmup))
        return self.down(0.5 * (1 + math.cos(math.pi * progress)))


@dataclass(frozen=True)
class WarmupStableDecay(Decay):
    """Warm-up, a plateau at 1, then a decay to `final_factor` over the last `decay_fraction` of the tokens."""

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
