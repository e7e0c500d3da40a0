"""What schedules share: a linear warm-up from zero, then a shape of their own."""

from __future__ import annotations

from dataclasses import dataclass

from polarlm.errors import UserError


@dataclass(frozen=True)
class Schedule:
    """The factor on the peak learning rate; a shape overrides `after_warmup`."""

    warmup_fraction: float = 0.05
    warmup_tokens: int | None = None

    def warmup(self, total: int) -> float:
        """Tokens of the warm-up in a run of `total` tokens."""
        return self.warmup_tokens if self.warmup_tokens is not None else self.warmup_fraction * total

    def check(self, total: int) -> None:
        """Refuse what can't be: a run without tokens, a warm-up longer than the run."""
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
        """From 1, where all of the decay is left, to the final factor."""
        return self.final_factor + (1 - self.final_factor) * left
