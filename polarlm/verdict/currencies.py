"""Gains in three budgets: the tokens, FLOPs and seconds that the reference needs for the loss that a block reached.

Seconds are processor seconds where both runs know them (one thread on a CPU): a busy neighbour does not change them.

A factor of 1.3 in seconds says: the reference would have needed 1.3 times the block's seconds to come to the block's
final loss. The reference's cost is read off its own learning curve, seed by seed; beyond its end the curve is continued
along its last half (loss against log cost) up to four times the cost. With a decaying learning rate both readings make
gains look smaller than they are: before the end the curve lies above what a shorter, fully decayed run would reach,
and its last half is steeper than a longer run would be.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from polarlm.verdict.comparison import BETTER, NOT_SHOWN, WORSE
from polarlm.verdict.evidence import Estimate, estimate_mean

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
