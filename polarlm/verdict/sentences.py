"""A comparison in words: the claim, its evidence, its power and its cost."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from polarlm.verdict.budget import Gain, describe_budgets
from polarlm.verdict.comparison import EQUIVALENT, NOT_SHOWN, Comparison, seeds_to_decide, smallest_effect
from polarlm.verdict.evidence import ALPHA


def verdict(comparison: Comparison, measure: str, *more: Any, **options: Any) -> str:
    """All that `verdict_parts` says, as one text."""
    return " ".join(verdict_parts(comparison, measure, *more, **options))


def verdict_parts(
    comparison: Comparison,
    measure: str,
    gaps: Mapping[str, float | None] | None = None,
    gained: Sequence[Gain] = (),
    head_sizes: tuple[int | None, int | None] = (None, None),
) -> list[str]:
    """One careful sentence about a comparison, followed by its power, its gains, its budgets and the head sizes."""
    c = comparison
    parts = [_claim(c, measure)]
    lost = [
        f"{count} failed or diverged seed{'s' if count > 1 else ''} of {name}"
        for count, name in zip(c.diverged, (c.treatment, c.baseline))
        if count
    ]
    if lost:
        parts.append(f"Left out: {' and '.join(lost)}. A block that lost seeds cannot be declared better.")
    if c.planned and c.difference.n < c.planned:
        parts.append(f"{c.difference.n} of {c.planned} planned seeds have finished; the verdict needs all of them.")
    if c.looks:
        looks = listed([str(n) for n in c.looks])
        parts.append(f"Seeds were added after looking at {looks} of them, so the always-valid rule decides.")
    parts += [*_second_opinions(c), *_power(c, measure)]
    if gained:
        parts.append(
            f"For {c.treatment}'s loss {c.baseline} needs {listed([gain.words() for gain in gained])} "
            "(more than 1× is a saving; the smallest first)."
        )
    if gaps is not None:
        parts.append(describe_budgets(gaps))
    if head_sizes[0] and head_sizes[1]:
        parts.append(
            f"Head size {head_sizes[0]} in both."
            if head_sizes[0] == head_sizes[1]
            else f"Head sizes differ: {head_sizes[0]} against {head_sizes[1]}."
        )
    return [part for part in parts if part]


def _claim(c: Comparison, measure: str) -> str:
    d = c.difference
    size = f"{signed(d.mean)} {measure}"
    if d.low is None or d.high is None:
        return f"{c.treatment}: {NOT_SHOWN} against {c.baseline}: {_why_no_interval(c, size)}"
    method = "Welch t" if not c.seeds else d.method
    pairing = f"{d.n} paired seeds" if c.seeds else f"{d.n} seeds each, not paired"
    p = c.p_adjusted if c.p_adjusted is not None else c.p_value
    correction = ""
    if c.family > 1 and c.p_value is not None:
        correction = f" after Holm over {c.family} comparisons, {probability(c.p_value).lstrip('= ')} alone"
    evidence = (
        f"95 % interval {signed(d.low)} to {signed(d.high)}; {pairing}, {method}, "
        f"p {probability(p if p is not None else math.nan)}{correction}"
    )
    if c.outcome == EQUIVALENT and c.margin:
        return (
            f"{c.treatment}: no difference from {c.baseline} larger than {c.margin:.3g} {measure} "
            f"({size}; {evidence}; equivalence p {probability(c.p_equivalent or 0.0)})."
        )
    if c.outcome == NOT_SHOWN:
        return f"{c.treatment}: {NOT_SHOWN} against {c.baseline} ({size}; {evidence})."
    word = "lower" if d.mean < 0 else "higher"
    small = f" This is within the margin of {c.margin:.3g}." if c.is_equivalent and c.margin else ""
    return f"{c.treatment}: {c.outcome} than {c.baseline}, {word} by {abs(d.mean):.3g} {measure} ({evidence}).{small}"


def _second_opinions(c: Comparison) -> list[str]:
    words = []
    if c.p_unpaired is not None:
        words.append(f"unpaired p {probability(c.p_unpaired)}")
    if c.correlation is not None:
        words.append(f"the seeds' losses correlate by {signed(round(c.correlation, 2))}")
    if c.p_sign_flip is not None:
        words.append(f"sign-flip p {probability(c.p_sign_flip)}")
    return [f"Other tests, which do not decide: {', '.join(words)}."] if words else []


def _power(c: Comparison, measure: str) -> list[str]:
    if c.evidence is None:
        return []
    words = []
    smallest = smallest_effect(c.evidence, ALPHA / c.family)
    if smallest is not None:
        words.append(f"These seeds detect a true difference of {smallest:.2g} {measure} with 80 % power.")
    if c.outcome == NOT_SHOWN and not any(c.diverged):
        wanted = seeds_to_decide(c)
        words.append(
            "More than 200 seeds would be needed to decide."
            if wanted is None
            else f"About {wanted - c.difference.n} more seed{'s' * (wanted - c.difference.n != 1)} would decide, "
            "if difference and spread stay as they are."
        )
    return words


def _why_no_interval(c: Comparison, size: str) -> str:
    method = c.difference.method
    if method == "one seed":
        seed = c.seeds[0] if c.seeds else "?"
        return f"one shared seed has no interval ({size} at seed {seed}). Train at least three seeds of each."
    if method == "identical seeds":
        return f"the seeds gave identical results ({size}), so they are not repetitions. Check that the seed is used."
    if method == "no shared seed":
        return f"they share no seed ({size} between the means). Train the same seeds of each."
    if method == "too few seeds":
        return (
            f"{c.difference.n} seeds are too few for the always-valid rule, which applies after an early look ({size})."
        )
    return "at least one of them has no finite result."


def signed(number: float) -> str:
    """+0.0123 with a real minus sign."""
    return f"{number:+.3g}".replace("-", "−")


def probability(p: float) -> str:
    """`= 0.032`, or `< 0.001`."""
    return "< 0.001" if p < 0.001 else f"= {p:.3f}"


def listed(items: Sequence[str]) -> str:
    """`a, b and c`."""
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else list(items))
