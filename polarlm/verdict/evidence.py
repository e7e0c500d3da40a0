"""Estimates from a few seeds: mean, standard error, p-values and intervals.

Every interval here is the set of values that the matching test does not reject at the same level, so an interval and
a test can never contradict each other. Two rules exist. `fixed`: Student's t, for a number of seeds chosen before the
first result was seen. `always valid`: for seeds that were added after looking; its error rate holds however often one
looks and whenever one stops.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
ALPHA = 1 - CONFIDENCE
# Prior variance of (true difference / spread of a seed) in the always-valid rule. It holds for any value; this one
# decides fastest about effects of two to three spreads, which is what differences between blocks look like.
MIXTURE = 4.0


@dataclass(frozen=True)
class Evidence:
    """A mean with its standard error: `size` is the number of values it is a mean of (harmonic for two samples)."""

    mean: float
    error: float
    freedom: float
    size: float
    always_valid: bool = False

    def p_value(self, truth: float = 0.0) -> float:
        """Two-sided p-value of the hypothesis that the true value is `truth`."""
        t = abs(self.mean - truth) / self.error
        return min(1.0, 1 / self._evidence_ratio(t)) if self.always_valid else float(2 * stats.t.sf(t, self.freedom))

    def p_beyond(self, margin: float) -> float:
        """p-value of the hypothesis that the true value lies outside ±margin (two one-sided tests, Schuirmann 1987)."""
        if abs(self.mean) >= margin:
            return 1.0
        nearest = (margin - abs(self.mean)) / self.error
        if self.always_valid:  # both ends must be excluded; the nearer one decides
            return min(1.0, 1 / self._evidence_ratio(nearest))
        return float(stats.t.sf(nearest, self.freedom))

    def interval(self, alpha: float = ALPHA) -> tuple[float, float]:
        """All values with p_value ≥ alpha; infinite where this many seeds cannot exclude any value."""
        half = self.critical(alpha) * self.error
        return self.mean - half, self.mean + half

    def critical(self, alpha: float) -> float:
        """How many standard errors from the mean a value must be to be rejected at level alpha."""
        if not self.always_valid:
            return float(stats.t.isf(alpha / 2, self.freedom))
        # Solve _evidence_ratio(t) = 1 / alpha for t.
        gain = 1 + self.size * MIXTURE
        bound = (math.sqrt(gain) / alpha) ** (2 / (self.freedom + 1))
        return math.inf if bound >= gain else math.sqrt(self.freedom * (bound - 1) / (1 - bound / gain))

    def _evidence_ratio(self, t: float) -> float:
        """Likelihood ratio of "effect sizes ~ N(0, MIXTURE)" to "no effect", invariant to the unknown spread.

        Under no effect it is a non-negative martingale of mean 1 in the number of seeds, so by Ville's inequality it
        ever exceeds 1/α with probability at most α (Lai 1976; Pérez-Ortiz et al. 2024): one may look at any time.
        """
        gain = 1 + self.size * MIXTURE
        square = t * t / self.freedom
        exponent = (self.freedom + 1) / 2
        log_ratio = exponent * (math.log1p(square) - math.log1p(square / gain)) - 0.5 * math.log(gain)
        return math.exp(min(log_ratio, 700.0))


def evidence_of_mean(values: Sequence[float] | np.ndarray, always_valid: bool = False) -> Evidence | None:
    """The mean of a sample; None for fewer than two values, or for values that agree to the last bit."""
    sample = np.asarray(values, dtype=float)
    if len(sample) < 2 or is_constant(sample):
        return None
    error = float(sample.std(ddof=1) / math.sqrt(len(sample)))
    return Evidence(float(sample.mean()), error, len(sample) - 1, len(sample), always_valid)


def evidence_of_gap(ours: Sequence[float], theirs: Sequence[float], always_valid: bool = False) -> Evidence | None:
    """The difference of two means without pairing: Welch's error and degrees of freedom (pooled when always valid)."""
    a, b = np.asarray(ours, dtype=float), np.asarray(theirs, dtype=float)
    if min(len(a), len(b)) < 2 or (is_constant(a) and is_constant(b)):
        return None
    size = len(a) * len(b) / (len(a) + len(b))
    gap = float(a.mean() - b.mean())
    if always_valid:
        freedom = float(len(a) + len(b) - 2)
        pooled = ((len(a) - 1) * a.var(ddof=1) + (len(b) - 1) * b.var(ddof=1)) / freedom
        return Evidence(gap, math.sqrt(pooled / size), freedom, size, True)
    shares = np.array([a.var(ddof=1) / len(a), b.var(ddof=1) / len(b)])
    freedom = float(shares.sum() ** 2 / (shares**2 / np.array([len(a) - 1, len(b) - 1])).sum())
    return Evidence(gap, math.sqrt(shares.sum()), freedom, size)


def sign_flip_p(differences: Sequence[float] | np.ndarray) -> float:
    """Two-sided p-value of paired differences without assuming a distribution: under no effect every sign may flip."""
    test = stats.permutation_test(
        (np.asarray(differences, dtype=float),),
        lambda sample, axis: np.mean(sample, axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=20_000,  # all of them up to 14 seeds
        alternative="two-sided",
        random_state=np.random.default_rng(0),
    )
    return float(test.pvalue)


def is_constant(sample: np.ndarray) -> bool:
    """Do the values agree up to rounding? Then they are not repetitions, whatever their number."""
    # Subtracting equal offsets leaves differences of rounding size only.
    return bool(np.ptp(sample) <= 1e-12 * max(1.0, float(np.abs(sample).max())))


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
