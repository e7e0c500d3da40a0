"""Budgets: whether two runs spent the same, and the tokens, FLOPs and seconds that a better block saves."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from polarlm.verdict.comparison import BETTER, NOT_SHOWN, WORSE
from polarlm.verdict.evidence import Estimate, estimate_mean

# How far two budgets may be apart and still be called equal (relative).
TOLERANCE = {"parameters": 0.02, "tokens": 0.01, "FLOPs": 0.05, "seconds": 0.05}


@dataclass(frozen=True)
class Budget:
    """What a run may spend; None where it is not known."""

    parameters: float | None = None
    tokens: float | None = None
    flops: float | None = None
    seconds: float | None = None


def budget_gaps(treatment: Budget, baseline: Budget) -> dict[str, float | None]:
    """Relative differences (treatment / baseline − 1) by name; None where one of the two is unknown."""
    names = [{"flops": "FLOPs"}.get(f.name, f.name) for f in fields(Budget)]
    pairs = [(getattr(treatment, f.name), getattr(baseline, f.name)) for f in fields(Budget)]
    return {name: (a / b - 1 if a and b else None) for name, (a, b) in zip(names, pairs)}


def equal_budgets(gaps: Mapping[str, float | None]) -> list[str]:
    """The budgets that are equal within their tolerance."""
    return [name for name, gap in gaps.items() if gap is not None and abs(gap) <= TOLERANCE[name]]


def is_fair(gaps: Mapping[str, float | None]) -> bool:
    """A comparison of blocks needs equal parameters and tokens, or equal FLOPs, or equal seconds.

    What is not known at all cannot be held against a pair: runs that recorded no budget are compared with a warning.
    """
    if all(gap is None for gap in gaps.values()):
        return True
    equal = equal_budgets(gaps)
    return "FLOPs" in equal or "seconds" in equal or {"parameters", "tokens"} <= set(equal)


def describe_budgets(gaps: Mapping[str, float | None]) -> str:
    """Name which budgets are equal, which are not and by how much, and which are unknown."""
    equal = equal_budgets(gaps)
    different = [f"{n} {percent(g)}" for n, g in gaps.items() if g is not None and n not in equal]
    unknown = [n for n, g in gaps.items() if g is None]
    listed = (("Equal", equal), ("Not equal", different), ("Unknown", unknown))
    return " ".join(f"{word}: {', '.join(names)}." for word, names in listed if names)


def unfair_reason(gaps: Mapping[str, float | None]) -> str:
    """Why a pair is not a comparison of blocks alone."""
    different = [f"{n} {percent(g)}" for n, g in gaps.items() if g is not None and abs(g) > TOLERANCE[n]]
    return (
        f"unequal budgets ({', '.join(different)}): neither parameters and tokens, nor FLOPs, nor seconds are equal; "
        "train with match=parameters, match=flops or match=seconds"
    )


def percent(fraction: float) -> str:
    """+1.5 %, with a real minus sign."""
    return f"{100 * fraction:+.1f} %".replace("-", "−")


# -- gains: what the reference needs for the loss that a block reached ------------------------------------------------


# A factor of 1.3 in seconds says: the reference would have needed 1.3 times the block's seconds to come to the block's
# final loss. The reference's cost is read off its own learning curve, seed by seed; beyond its end the curve is
# continued along its last half (loss against log cost) up to four times the cost. With a decaying learning rate both
# readings make gains look smaller than they are: before the end the curve lies above what a shorter, fully decayed run
# would reach, and its last half is steeper than a longer run would be. Seconds are processor seconds where both runs
# know them (one thread on a CPU): a busy neighbour does not change them.
PROCESSOR = "processor seconds"
CURRENCIES = ("tokens", "FLOPs", "seconds")
FARTHEST = 4.0  # times the cost of the reference's whole run


@dataclass(frozen=True)
class LossCurve:
    """Validations of one run: costs so far by currency, and the loss at each."""

    costs: Mapping[str, np.ndarray]
    losses: np.ndarray


@dataclass(frozen=True)
class Gain:
    """How many times a block's cost the reference needs for the block's loss (above 1: the block is cheaper)."""

    currency: str
    factor: Estimate

    @property
    def outcome(self) -> str:
        """better when the whole interval lies above 1, worse when it lies below, else no difference shown."""
        low, high = self.factor.low, self.factor.high
        if low is None or high is None:
            return NOT_SHOWN
        return BETTER if low > 1 else WORSE if high < 1 else NOT_SHOWN

    def words(self) -> str:
        """`1.31× the seconds (1.12 to 1.53)`."""
        f = self.factor
        between = f" ({f.low:.2f} to {f.high:.2f})" if f.low is not None and f.high is not None else ""
        return f"{f.mean:.2f}× the {self.currency}{between}"


def cost_at(curve: LossCurve, currency: str, loss: float) -> float | None:
    """What the run of this curve spent (or would have to spend) until it reached `loss`; None if nobody can tell."""
    cost = np.asarray(curve.costs.get(currency, ()), dtype=float)
    if len(cost) != len(curve.losses):
        return None
    known = np.isfinite(cost) & np.isfinite(curve.losses) & (cost > 0)
    cost, losses = cost[known], curve.losses[known]
    if len(cost) < 2 or not math.isfinite(loss):
        return None
    best = np.minimum.accumulate(losses)  # a curve that rose again has nevertheless been there
    if loss > best[0]:
        return None  # reached before the first validation
    if loss >= best[-1]:
        after = int(np.argmax(best <= loss))
        if best[after] == loss or after == 0:
            return float(cost[after])
        share = (best[after - 1] - loss) / (best[after - 1] - best[after])
        return float(math.exp((1 - share) * math.log(cost[after - 1]) + share * math.log(cost[after])))
    tail = cost >= cost[-1] / 2
    if tail.sum() < 3:
        tail = np.arange(len(cost)) >= len(cost) - 3  # of two validations both
    slope = np.polyfit(np.log(cost[tail]), losses[tail], 1)[0]
    if slope >= 0:
        return None
    needed = (losses[-1] - loss) / -slope if losses[-1] > loss else 0.0
    return float(cost[-1] * math.exp(min(needed, math.log(FARTHEST))))


def gains(ours: Mapping[int, LossCurve], theirs: Mapping[int, LossCurve], seeds: Sequence[int]) -> list[Gain]:
    """The gain in every currency over paired seeds, weakest first."""
    results = []
    paired = [curve for seed in seeds for curve in (ours.get(seed), theirs.get(seed)) if curve is not None]
    undisturbed = bool(paired) and all(np.isfinite(curve.costs.get(PROCESSOR, [np.nan])).all() for curve in paired)
    for currency in (*CURRENCIES[:2], PROCESSOR if undisturbed else CURRENCIES[2]):
        factors = []
        for seed in seeds:
            curve, reference = ours.get(seed), theirs.get(seed)
            if curve is None or reference is None or not len(curve.losses) or currency not in curve.costs:
                continue
            spent, needed = curve.costs[currency][-1], cost_at(reference, currency, float(curve.losses[-1]))
            if needed is not None and spent > 0:
                factors.append(needed / spent)
        if factors:
            results.append(Gain(currency, estimate_mean(factors, log=True)))
    rank = {WORSE: 0, NOT_SHOWN: 1, BETTER: 2}
    # As printed: what differs by rounding alone keeps its order on every machine.
    return sorted(results, key=lambda gain: (rank[gain.outcome], round(gain.factor.mean, 2)))
