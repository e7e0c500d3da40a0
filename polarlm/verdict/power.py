"""What this many seeds could have shown, and how many more would decide."""

import math

import numpy as np
from scipy import optimize, stats

from polarlm.verdict.comparison import Comparison
from polarlm.verdict.evidence import ALPHA, Evidence

POWER = 0.8
MOST_SEEDS = 200


def power(effect: float, error: float, freedom: float, alpha: float = ALPHA) -> float:
    """Probability that Student's two-sided test shows a true difference of `effect` with this standard error."""
    critical, shift = float(stats.t.isf(alpha / 2, freedom)), abs(effect) / error
    # The chance of a significant difference of the wrong sign is left out: it would be no success.
    return float(stats.nct.sf(critical, freedom, shift)) if shift < 35 else 1.0


def smallest_effect(evidence: Evidence, alpha: float = ALPHA) -> float | None:
    """The smallest true difference that such seeds would show four times out of five; None when there is none."""
    if evidence.always_valid:  # an approximation: the rule's own critical value in the place of Student's
        critical = evidence.critical(alpha)
        if math.isinf(critical):
            return None
        alpha = float(2 * stats.t.sf(critical, evidence.freedom))
    most = 34.0
    if power(most, 1.0, evidence.freedom, alpha) < POWER:
        return None
    shift = optimize.brentq(lambda d: power(d, 1.0, evidence.freedom, alpha) - POWER, 1e-9, most, xtol=1e-6)
    return float(shift) * evidence.error


def equivalence_power(effect: float, margin: float, error: float, freedom: float, alpha: float = ALPHA) -> float:
    """Probability that two one-sided tests place a true difference of `effect` inside ±margin.

    Given the estimated error the mean must fall into what is left of the margin; averaged over that estimate, which is
    `error` times the root of a χ² over its degrees of freedom.
    """
    shares = (np.arange(400) + 0.5) / 400
    estimated = np.sqrt(stats.chi2.ppf(shares, freedom) / freedom)
    room = margin / error - float(stats.t.isf(alpha, freedom)) * estimated
    inside = stats.norm.cdf(room - effect / error) - stats.norm.cdf(-room - effect / error)
    return float(np.where(room > 0, inside, 0.0).mean())


def seeds_to_decide(comparison: Comparison) -> int | None:
    """How many seeds in all would decide (difference or equivalence) four times out of five.

    It supposes that the difference and the spread seen so far are the true ones; None when 200 are not enough.
    """
    c, e = comparison, comparison.evidence
    if e is None:
        return None
    now = c.difference.n
    alpha = ALPHA / c.family
    for n in range(now + 1, MOST_SEEDS + 1):
        grown = Evidence(
            e.mean, e.error * math.sqrt(now / n), e.freedom * (n - 1) / (now - 1), e.size * n / now, e.always_valid
        )
        level = alpha
        if grown.always_valid:
            critical = grown.critical(alpha)
            level = 0.0 if math.isinf(critical) else float(2 * stats.t.sf(critical, grown.freedom))
        if level and power(e.mean, grown.error, grown.freedom, level) >= POWER:
            return n
        inside = c.margin and abs(e.mean) < c.margin
        if level and inside and equivalence_power(e.mean, c.margin or 0.0, grown.error, grown.freedom, level) >= POWER:
            return n
    return None
