"""One setting against another by the loss of each seed: difference, tests, and what may be claimed.

Every measure is a loss (lower is better) and every difference is treatment − baseline.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from polarlm.verdict.estimates import Estimate
from polarlm.verdict.evidence import ALPHA, Evidence, evidence_of_gap, evidence_of_mean, sign_flip_p

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
