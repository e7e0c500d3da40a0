"""A trial: the same tuning for every block, then paired seeds until the verdict is decided or the budget is spent.

The plan is written down before anything runs and never changed. The stopping rule is the always-valid one, looked at
after every seed, so stopping as soon as it decides costs nothing.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from polarlm.errors import UserError
from polarlm.verdict.comparison import NOT_SHOWN
from polarlm.verdict.judgement import COMPARED, Judgement

TUNING_SEED = 1000  # of the search; the verdict never sees it
RULE = "always-valid test after every seed, Holm over the blocks; stop when all are decided"
# The search halves twice: all rates on a quarter of the steps, the better part on half of them.
SHARES = (0.25, 0.5)


@dataclass(frozen=True)
class TrialPlan:
    """What a trial will do; `trial.yaml` holds exactly this."""

    blocks: tuple[str, ...]  # the first is the reference
    data: str
    model: str
    steps: int
    metric: str
    margin: float | None
    learning_rates: tuple[float, ...]
    most_seeds: int
    budget_seconds: float
    overrides: tuple[str, ...] = ()
    rule: str = RULE

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a yaml file."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "TrialPlan":
        """The plan of a yaml file; unknown or missing keys are refused."""
        names = {field.name for field in fields(cls)}
        if not isinstance(values, Mapping) or set(values) != names:
            raise UserError(f"trial.yaml must have exactly these keys: {', '.join(sorted(names))}")
        plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**plain)

    def check(self) -> "TrialPlan":
        """The same plan, or one sentence about what is wrong with it."""
        if len(self.blocks) < 2 or len(set(self.blocks)) < len(self.blocks):
            raise UserError(f"A trial compares at least two different blocks; found {', '.join(self.blocks) or 'none'}")
        if len(self.learning_rates) < 2 or min(self.learning_rates) <= 0:
            raise UserError("--lr needs at least two positive learning rates, e.g. --lr 3e-4,1e-3,3e-3,1e-2")
        if self.steps < 8:
            raise UserError(f"--steps {self.steps}: the search trains on a quarter of the steps; give at least 8")
        if self.most_seeds < 4:
            raise UserError(f"--seeds {self.most_seeds}: the always-valid rule decides nothing before four seeds")
        if not self.budget_seconds > 0:
            raise UserError("--budget must be positive, e.g. --budget 2h")
        return self


@dataclass(frozen=True)
class Round:
    """One round of the search: so many steps for each of these learning rates."""

    steps: int
    learning_rates: tuple[float, ...]


def first_round(plan: TrialPlan) -> Round:
    """Every learning rate on a quarter of the steps."""
    return Round(max(2, round(SHARES[0] * plan.steps)), tuple(sorted(plan.learning_rates)))


def next_round(plan: TrialPlan, before: Round, losses: Mapping[float, float | None]) -> Round | None:
    """The better half of the rates on more steps; None when the search is over."""
    number = next((i for i, s in enumerate(SHARES) if max(2, round(s * plan.steps)) == before.steps), len(SHARES)) + 1
    if number >= len(SHARES):
        return None
    keep = max(2, math.ceil(len(before.learning_rates) / 3))
    return Round(max(2, round(SHARES[number] * plan.steps)), tuple(sorted(ranked(losses)[:keep])))


def ranked(losses: Mapping[float, float | None]) -> list[float]:
    """Learning rates from the lowest loss on; a diverged or failed run comes last, then the smaller rate first."""

    def place(rate: float) -> tuple[float, float]:
        loss = losses.get(rate)
        return (loss if loss is not None and math.isfinite(loss) else math.inf, rate)

    return sorted(losses, key=place)


def edge_note(block: str, rate: float, plan: TrialPlan) -> str | None:
    """A best rate at the end of the grid may not be the best: say so."""
    grid = sorted(plan.learning_rates)
    if rate not in (grid[0], grid[-1]):
        return None
    end = "lower" if rate == grid[0] else "upper"
    return f"{block}: the best learning rate, {rate:g}, is at the {end} end of the grid: a wider one may be better."


def is_decided(judgement: Judgement) -> bool:
    """Has every block that can be judged a verdict? (Unequal budgets are refused; more seeds would not change that.)"""
    return not any(row.role == COMPARED and row.outcome == NOT_SHOWN for row in judgement.rows)


def seconds_of(text: str) -> float:
    """Seconds of 90, 90s, 15m, 2h or 1.5h."""
    units = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    number, unit = (text[:-1], text[-1]) if text[-1:] in units else (text, "s")
    try:
        return float(number) * units[unit]
    except ValueError:
        raise UserError(f"--budget {text!r} is no time; write 90s, 15m, 2h or 1d") from None
