"""Is one block better than another? Paired seeds, intervals, Holm's correction, budgets, a careful sentence.

Every measure here is a loss (lower is better) and every difference is treatment − baseline. The rules of judgement:
a verdict needs an interval, an interval needs at least two seeds, a seed that diverged forbids the word "better", and
several comparisons against one baseline share the error rate (Holm 1979).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
# Below ten seeds the bootstrap covers less than it promises, so Student's t is used; from ten on nothing is assumed
# to be normal.
BOOTSTRAP_FROM = 10
RESAMPLES = 20_000
# How far two budgets may be apart and still be called matched (relative).
TOLERANCE = {"parameters": 0.02, "tokens": 0.01, "FLOPs": 0.05}
NO_DIFFERENCE = "no difference shown"


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its confidence interval; `low` and `high` are None where no interval exists."""

    mean: float
    low: float | None
    high: float | None
    n: int
    method: str  # "one seed", "identical seeds", "t", "paired t", "Welch t", "bootstrap"

    @property
    def half_width(self) -> float | None:
        """Half of the interval, for `mean ± half_width` (None without an interval)."""
        return None if self.low is None or self.high is None else (self.high - self.low) / 2


@dataclass(frozen=True)
class Budget:
    """What a run may spend; None where it is not known."""

    parameters: float | None = None
    tokens: float | None = None
    flops: float | None = None


@dataclass(frozen=True)
class Comparison:
    """One treatment against one baseline on one loss, before or after Holm's correction."""

    treatment: str
    baseline: str
    difference: Estimate
    p_value: float | None
    p_adjusted: float | None = None
    family: int = 1  # comparisons that share the error rate
    diverged: tuple[int, int] = (0, 0)  # seeds without a finite result (also failed ones): treatment, baseline
    seeds: tuple[int, ...] = field(default=())  # the seeds that were paired

    @property
    def outcome(self) -> str:
        """One of: better, worse, no difference shown."""
        p = self.p_adjusted if self.p_adjusted is not None else self.p_value
        if p is None or self.difference.low is None or p >= 1 - CONFIDENCE:
            return NO_DIFFERENCE
        if self.difference.mean < 0:
            return NO_DIFFERENCE if self.diverged[0] else "better"
        return NO_DIFFERENCE if self.diverged[1] else "worse"


def estimate_mean(values: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """Mean of the finite values with a t interval (bootstrap BCa from ten values on)."""
    sample = np.asarray([v for v in values if v is not None and math.isfinite(v)], dtype=float)
    n = len(sample)
    if n == 0:
        return Estimate(math.nan, None, None, 0, "no value")
    mean = float(sample.mean())
    if n == 1:
        return Estimate(mean, None, None, 1, "one seed")
    if _is_constant(sample):
        # Repetitions that agree to the last bit were not independent; a width of zero would claim too much.
        return Estimate(mean, None, None, n, "identical seeds")
    if n >= BOOTSTRAP_FROM:
        low, high = _bca_interval(sample, confidence)
        return Estimate(mean, low, high, n, "bootstrap")
    half = float(stats.t.ppf((1 + confidence) / 2, n - 1) * sample.std(ddof=1) / math.sqrt(n))
    return Estimate(mean, mean - half, mean + half, n, "t")


def compare_seeds(
    treatment: str,
    treatment_losses: Mapping[int, float],
    baseline: str,
    baseline_losses: Mapping[int, float],
    confidence: float = CONFIDENCE,
) -> Comparison:
    """Compare two settings by the loss of each seed: paired where at least two seeds are shared, else Welch's t."""
    ours, diverged_ours = _finite(treatment_losses)
    theirs, diverged_theirs = _finite(baseline_losses)
    diverged = (diverged_ours, diverged_theirs)
    shared = tuple(sorted(set(ours) & set(theirs)))
    if len(shared) >= 2 or min(len(ours), len(theirs)) < 2:
        differences = np.asarray([ours[s] - theirs[s] for s in shared])
        difference = estimate_mean(list(differences), confidence)
        if difference.n == 0 and ours and theirs:  # no shared seed: still show how far apart the means are
            gap = float(np.mean(list(ours.values())) - np.mean(list(theirs.values())))
            difference = Estimate(gap, None, None, 0, "no shared seed")
        if difference.method == "t":
            difference = replace(difference, method="paired t")
        p = None if difference.low is None else _paired_p(differences, difference.method)
        return Comparison(treatment, baseline, difference, p, diverged=diverged, seeds=shared)
    a, b = np.asarray(list(ours.values())), np.asarray(list(theirs.values()))
    gap, n = float(a.mean() - b.mean()), min(len(a), len(b))
    if _is_constant(a) and _is_constant(b):
        return Comparison(treatment, baseline, Estimate(gap, None, None, n, "identical seeds"), None, diverged=diverged)
    test = stats.ttest_ind(a, b, equal_var=False)
    low, high = test.confidence_interval(confidence)
    return Comparison(
        treatment, baseline, Estimate(gap, float(low), float(high), n, "Welch t"), float(test.pvalue), diverged=diverged
    )


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down adjustment; None (no test was possible) stays None and does not count."""
    known = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    running = 0.0
    for rank, (p, i) in enumerate(known):
        running = max(running, min(1.0, (len(known) - rank) * p))
        adjusted[i] = running
    return adjusted


def adjust(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The same comparisons with Holm's correction over all that have a p-value."""
    p_adjusted = holm([c.p_value for c in comparisons])
    family = sum(p is not None for p in p_adjusted)
    return [replace(c, p_adjusted=p, family=max(family, 1)) for c, p in zip(comparisons, p_adjusted)]


def budget_gaps(treatment: Budget, baseline: Budget) -> dict[str, float | None]:
    """Relative differences (treatment / baseline − 1) of parameters, tokens and FLOPs; None where one is unknown."""
    pairs = {
        "parameters": (treatment.parameters, baseline.parameters),
        "tokens": (treatment.tokens, baseline.tokens),
        "FLOPs": (treatment.flops, baseline.flops),
    }
    return {name: (a / b - 1 if a and b else None) for name, (a, b) in pairs.items()}


def is_matched(gaps: Mapping[str, float | None]) -> bool:
    """A fair pair: the same tokens with the same parameters, or the same FLOPs."""

    def close(name: str) -> bool:
        gap = gaps.get(name)
        return gap is not None and abs(gap) <= TOLERANCE[name]

    return close("FLOPs") or (close("parameters") and close("tokens"))


def describe_budgets(gaps: Mapping[str, float | None]) -> str:
    """Name which budgets are matched, which are not and by how much, and which are unknown."""
    matched = [n for n, g in gaps.items() if g is not None and abs(g) <= TOLERANCE[n]]
    different = [f"{n} {_percent(g)}" for n, g in gaps.items() if g is not None and abs(g) > TOLERANCE[n]]
    unknown = [n for n, g in gaps.items() if g is None]
    parts = []
    if matched:
        parts.append("Matched: " + ", ".join(matched) + ".")
    if different:
        parts.append("Not matched: " + ", ".join(different) + ".")
    if unknown:
        parts.append("Unknown: " + ", ".join(unknown) + ".")
    if not is_matched(gaps):
        parts.append("Neither equal FLOPs nor equal parameters and tokens: this is not a comparison of blocks alone.")
    return " ".join(parts)


def verdict(comparison: Comparison, measure: str, gaps: Mapping[str, float | None] | None = None) -> str:
    """One careful sentence about a comparison, followed by the state of the budgets."""
    c, d = comparison, comparison.difference
    size = f"{_signed(d.mean)} {measure}"
    if d.low is None or d.high is None:
        sentence = f"{c.treatment}: {NO_DIFFERENCE} against {c.baseline}: {_why_no_interval(c, size)}"
    else:
        pairing = f"{d.n} seeds each, not paired" if d.method == "Welch t" else f"{d.n} paired seeds"
        p = c.p_adjusted if c.p_adjusted is not None else c.p_value
        correction = ""
        if c.family > 1 and c.p_value is not None:
            correction = f" after Holm over {c.family} comparisons, {_probability(c.p_value).lstrip('= ')} alone"
        evidence = (
            f"95 % interval {_signed(d.low)} to {_signed(d.high)}; {pairing}, {d.method}, "
            f"p {_probability(p if p is not None else math.nan)}{correction}"
        )
        if c.outcome == NO_DIFFERENCE:
            sentence = f"{c.treatment}: {NO_DIFFERENCE} against {c.baseline} ({size}; {evidence})."
        else:
            word = "lower" if d.mean < 0 else "higher"
            sentence = (
                f"{c.treatment}: {c.outcome} than {c.baseline}, {word} by {abs(d.mean):.3g} {measure} ({evidence})."
            )
    lost = [
        f"{count} failed or diverged seed{'s' if count > 1 else ''} of {name}"
        for count, name in zip(c.diverged, (c.treatment, c.baseline))
        if count
    ]
    if lost:
        sentence += f" Left out: {' and '.join(lost)}, so no win against them is claimed."
    return sentence if gaps is None else f"{sentence} {describe_budgets(gaps)}"


def _why_no_interval(comparison: Comparison, size: str) -> str:
    difference = comparison.difference
    if difference.method == "one seed":
        seed = comparison.seeds[0] if comparison.seeds else "?"
        return f"one shared seed has no interval ({size} at seed {seed}). Train at least three seeds of each."
    if difference.method == "identical seeds":
        return f"the seeds gave identical results ({size}), so they are not repetitions. Check that the seed is used."
    if difference.method == "no shared seed":
        return f"they share no seed ({size} between the means). Train the same seeds of each."
    return "at least one of them has no finite result."


def _finite(losses: Mapping[int, float]) -> tuple[dict[int, float], int]:
    finite = {seed: float(v) for seed, v in losses.items() if v is not None and math.isfinite(v)}
    return finite, len(losses) - len(finite)


def _is_constant(sample: np.ndarray) -> bool:
    # Subtracting equal offsets leaves differences of rounding size only.
    return bool(np.ptp(sample) <= 1e-12 * max(1.0, float(np.abs(sample).max())))


def _paired_p(differences: np.ndarray, method: str) -> float:
    if method != "bootstrap":
        return float(stats.ttest_1samp(differences, 0.0).pvalue)
    # Under the null hypothesis each difference is as likely with the other sign (sign-flip test).
    rng = np.random.default_rng(0)
    signs = rng.choice((-1.0, 1.0), size=(RESAMPLES, len(differences)))
    extreme = np.abs(signs @ differences) >= abs(differences.sum()) * (1 - 1e-12)
    return float((extreme.sum() + 1) / (RESAMPLES + 1))


def _bca_interval(sample: np.ndarray, confidence: float) -> tuple[float, float]:
    """Bias-corrected and accelerated bootstrap interval of the mean (Efron 1987), with a fixed generator."""
    rng = np.random.default_rng(0)
    n = len(sample)
    means = sample[rng.integers(0, n, size=(RESAMPLES, n))].mean(axis=1)
    bias = stats.norm.ppf(np.clip((means < sample.mean()).mean(), 1 / RESAMPLES, 1 - 1 / RESAMPLES))
    jackknife = (sample.sum() - sample) / (n - 1)
    centred = jackknife.mean() - jackknife
    acceleration = (centred**3).sum() / (6 * (centred**2).sum() ** 1.5)
    z = bias + stats.norm.ppf(np.array([(1 - confidence) / 2, (1 + confidence) / 2]))
    low, high = np.quantile(means, stats.norm.cdf(bias + z / (1 - acceleration * z)))
    return float(low), float(high)


def _signed(number: float) -> str:
    return f"{number:+.3g}".replace("-", "−")


def _percent(fraction: float) -> str:
    return f"{100 * fraction:+.1f} %".replace("-", "−")


def _probability(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"= {p:.3f}"
