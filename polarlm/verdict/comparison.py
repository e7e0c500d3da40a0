"""One setting against another by the loss of each seed: difference, tests, and what may be claimed.

Below them: Holm's correction for several comparisons on one page with the intervals that agree with it, and power: what
this many seeds could have shown, and how many more would decide.

Every measure is a loss (lower is better) and every difference is treatment − baseline.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from scipy import optimize, stats

from polarlm.verdict.evidence import ALPHA, Estimate, Evidence, evidence_of_gap, evidence_of_mean, sign_flip_p

BETTER, WORSE, EQUIVALENT, NOT_SHOWN = "better", "worse", "equivalent", "no difference shown"
# With fewer seeds the smallest p-value that the sign-flip test can give is above 5 %.
SIGN_FLIPS_FROM = 6


@dataclass(frozen=True)
class Comparison:
    """One treatment against one baseline on one loss, before or after the correction for the number of comparisons."""

    treatment: str
    baseline: str
    difference: Estimate
    evidence: Evidence | None  # None where no interval exists; `difference.method` says why
    seeds: tuple[int, ...] = field(default=())  # the seeds that were paired
    diverged: tuple[int, int] = (0, 0)  # seeds without a finite result (also failed ones): treatment, baseline
    # Beside the main test, for readers who would have chosen otherwise: never used for the verdict.
    correlation: float | None = None  # of the two losses over the paired seeds; 0 means that pairing bought nothing
    p_unpaired: float | None = None
    p_sign_flip: float | None = None
    margin: float | None = None  # differences smaller than this do not matter
    looks: tuple[int, ...] = field(default=())  # numbers of seeds at which this comparison was looked at before
    planned: int | None = None  # seeds that were planned; with fewer no verdict is given
    lower_is_better: bool = True
    # Filled in by `adjust`.
    p_adjusted: float | None = None
    p_equivalent: float | None = None
    simultaneous: tuple[float, float] | None = None  # holds for all comparisons of the family at once
    family: int = 1  # comparisons that share the error rate
    alpha: float = ALPHA  # the level at which this comparison was decided

    @property
    def p_value(self) -> float | None:
        """p-value of "no difference" for this comparison alone."""
        return None if self.evidence is None else self.evidence.p_value()

    @property
    def joint_interval(self) -> tuple[float, float] | None:
        """Bonferroni's finite interval: all of them hold together with 95 %; None before `adjust` or without seeds."""
        if self.evidence is None or self.p_adjusted is None:
            return None
        low, high = self.evidence.interval(ALPHA / self.family)
        return (low, high) if math.isfinite(low) and math.isfinite(high) else None

    @property
    def is_shown(self) -> bool:
        """Is a difference in either direction shown, whatever may be claimed from it?"""
        p = self.p_value if self.p_adjusted is None else self.p_adjusted
        return p is not None and p < ALPHA

    @property
    def is_equivalent(self) -> bool:
        """Is it shown that the difference is smaller than the margin?"""
        p = self.p_equivalent
        if p is None and self.evidence is not None and self.margin:
            p = self.evidence.p_beyond(self.margin)
        return p is not None and p < ALPHA

    @property
    def outcome(self) -> str:
        """better, worse, equivalent or no difference shown; who lost seeds can neither win nor be called equivalent."""
        if self.planned and self.difference.n < self.planned:
            return NOT_SHOWN
        if self.is_shown:
            won = (self.difference.mean < 0) == self.lower_is_better
            winner_lost_seeds = self.diverged[0] if won else self.diverged[1]
            return NOT_SHOWN if winner_lost_seeds else BETTER if won else WORSE
        return EQUIVALENT if self.is_equivalent and not any(self.diverged) else NOT_SHOWN


def compare_seeds(
    treatment: str,
    treatment_losses: Mapping[int, float],
    baseline: str,
    baseline_losses: Mapping[int, float],
    *,
    margin: float | None = None,
    looks: tuple[int, ...] = (),
    planned: int | None = None,
    lower_is_better: bool = True,
) -> Comparison:
    """Compare two settings by the loss of each seed: paired where at least two seeds are shared, else Welch's t.

    `looks` are the numbers of seeds at which somebody saw this comparison before seeds were added; then only the
    always-valid rule keeps the error rate, and it is used. With `planned` seeds earlier looks had no verdict and count
    for nothing, unless seeds were added beyond the plan.
    """
    ours, diverged_ours = _finite(treatment_losses)
    theirs, diverged_theirs = _finite(baseline_losses)
    shared = tuple(sorted(set(ours) & set(theirs)))
    paired = len(shared) >= 2 or min(len(ours), len(theirs)) < 2
    n = len(shared) if paired else min(len(ours), len(theirs))
    if planned:
        looks = (planned,) if n > planned else ()
    always_valid = bool(looks)
    common = {
        "diverged": (diverged_ours, diverged_theirs),
        "margin": margin,
        "looks": looks,
        "planned": planned,
        "lower_is_better": lower_is_better,
    }
    if not paired:
        a, b = list(ours.values()), list(theirs.values())
        gap, evidence = float(np.mean(a) - np.mean(b)), evidence_of_gap(a, b, always_valid)
        difference = _estimate(gap, evidence, min(len(a), len(b)), "Welch t", "identical seeds")
        return Comparison(treatment, baseline, difference, evidence, **common)  # type: ignore[arg-type]
    pairs = np.array([[ours[s], theirs[s]] for s in shared]).reshape(-1, 2)
    differences = pairs[:, 0] - pairs[:, 1]
    evidence = evidence_of_mean(differences, always_valid)
    if len(shared) == 0:  # still show how far apart the means are
        means = [np.mean(list(x.values())) if x else math.nan for x in (ours, theirs)]
        difference = Estimate(
            float(means[0] - means[1]), None, None, 0, "no shared seed" if ours and theirs else "no value"
        )
    else:
        why = "one seed" if len(shared) == 1 else "identical seeds"
        difference = _estimate(float(differences.mean()), evidence, len(shared), "paired t", why)
    unpaired = evidence_of_gap(list(ours.values()), list(theirs.values()), always_valid)
    return Comparison(
        treatment,
        baseline,
        difference,
        evidence,
        seeds=shared,
        correlation=_correlation(pairs),
        p_unpaired=None if unpaired is None or evidence is None else unpaired.p_value(),
        p_sign_flip=sign_flip_p(differences) if evidence is not None and len(shared) >= SIGN_FLIPS_FROM else None,
        **common,  # type: ignore[arg-type]
    )


def compare_with_number(
    treatment: str,
    losses: Mapping[int, float],
    name: str,
    number: float,
    *,
    looks: tuple[int, ...] = (),
    planned: int | None = None,
    lower_is_better: bool = True,
) -> Comparison:
    """Compare the mean over seeds with one number that has no seeds of its own: the one-sample t rule."""
    ours, diverged = _finite(losses)
    differences = np.array([loss - number for loss in ours.values()])
    if planned:
        looks = (planned,) if len(ours) > planned else ()
    evidence = evidence_of_mean(differences, bool(looks))
    mean = float(differences.mean()) if len(differences) else math.nan
    why = {0: "no value", 1: "one seed"}.get(len(ours), "identical seeds")
    return Comparison(
        treatment,
        name,
        _estimate(mean, evidence, len(ours), "one-sample t", why),
        evidence,
        seeds=tuple(sorted(ours)),
        diverged=(diverged, 0),
        looks=looks,
        planned=planned,
        lower_is_better=lower_is_better,
    )


def _estimate(mean: float, evidence: Evidence | None, n: int, method: str, why_none: str) -> Estimate:
    if evidence is None:
        return Estimate(mean, None, None, n, why_none)
    low, high = evidence.interval()
    if math.isinf(low):
        return Estimate(mean, None, None, n, "too few seeds")
    return Estimate(mean, low, high, n, "always valid" if evidence.always_valid else method)


def _correlation(pairs: np.ndarray) -> float | None:
    if len(pairs) < 3 or np.ptp(pairs[:, 0]) == 0 or np.ptp(pairs[:, 1]) == 0:  # two points always lie on a line
        return None
    return float(np.corrcoef(pairs.T)[0, 1])


def _finite(losses: Mapping[int, float]) -> tuple[dict[int, float], int]:
    finite = {seed: float(v) for seed, v in losses.items() if v is not None and math.isfinite(v)}
    return finite, len(losses) - len(finite)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down adjustment (1979); None (no test was possible) stays None and does not count."""
    known = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    running = 0.0
    for rank, (p, i) in enumerate(known):
        running = max(running, min(1.0, (len(known) - rank) * p))
        adjusted[i] = running
    return adjusted


def adjust(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The same comparisons with Holm's correction over all that have a test, and intervals that hold together.

    Claims of a difference share one error rate and claims of equivalence another. The simultaneous intervals are those
    of Strassburger and Bretz (2008): with k comparisons left undecided by Holm each of them gets the interval at level
    α/k; a decided one is known to lie on its side of zero, and where all m are decided also inside the interval at α/m.
    """
    p_adjusted = holm([c.p_value for c in comparisons])
    p_equivalent = holm([c.evidence.p_beyond(c.margin) if c.evidence and c.margin else None for c in comparisons])
    tested = [p for p in p_adjusted if p is not None]
    undecided = sum(p >= ALPHA for p in tested)
    adjusted = []
    for c, p, equivalent in zip(comparisons, p_adjusted, p_equivalent):
        if p is None or c.evidence is None:
            adjusted.append(replace(c, family=max(len(tested), 1)))
            continue
        decided = p < ALPHA
        level = ALPHA / (undecided or len(tested))
        low, high = c.evidence.interval(level)
        if decided:
            if undecided:
                low, high = -math.inf, math.inf
            low, high = (low, min(high, 0.0)) if c.difference.mean < 0 else (max(low, 0.0), high)
        adjusted.append(
            replace(
                c,
                p_adjusted=p,
                p_equivalent=equivalent,
                simultaneous=(low, high),
                family=len(tested),
                alpha=level if not decided else ALPHA / len(tested),
            )
        )
    return adjusted


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
