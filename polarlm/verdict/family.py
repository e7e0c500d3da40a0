"""Several comparisons on one page share one error rate: Holm's correction and the intervals that agree with it."""

import math
from collections.abc import Sequence
from dataclasses import replace

from polarlm.verdict.comparison import Comparison
from polarlm.verdict.evidence import ALPHA


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
