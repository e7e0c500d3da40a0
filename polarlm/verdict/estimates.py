"""A mean over seeds with its 95 % interval, as tables and bands show it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polarlm.verdict.evidence import evidence_of_mean


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its confidence interval; `low` and `high` are None where no interval exists."""

    mean: float
    low: float | None
    high: float | None
    n: int
    method: str  # what the interval is (t, log t, paired t, Welch t, always valid), or why there is none

    @property
    def half_width(self) -> float | None:
        """Half of the interval, for `mean ± half_width` (None without an interval)."""
        return None if self.low is None or self.high is None else (self.high - self.low) / 2


def estimate_mean(values: Sequence[float | None], log: bool = False) -> Estimate:
    """Mean of the finite values with Student's t interval.

    With `log` both are taken of the logarithms: perplexity is the exponential of a loss, and only there is the mean
    the perplexity of the mean loss, the interval the image of the loss's interval, and its lower end positive.
    """
    finite = [float(v) for v in values if v is not None and math.isfinite(v)]
    sample = np.log(finite) if log else np.asarray(finite)
    back = math.exp if log else float
    if len(sample) == 0:
        return Estimate(math.nan, None, None, 0, "no value")
    mean, n = back(float(sample.mean())), len(sample)
    if n == 1:
        return Estimate(mean, None, None, 1, "one seed")
    evidence = evidence_of_mean(sample)
    if evidence is None:
        # Repetitions that agree to the last bit were not independent; a width of zero would claim too much.
        return Estimate(mean, None, None, n, "identical seeds")
    low, high = evidence.interval()
    return Estimate(mean, back(low), back(high), n, "log t" if log else "t")
