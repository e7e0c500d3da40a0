"""`compare --published 28.01`: does the mean of these seeds beat a published number?

One sample against a constant: Student's t over our seeds. The published number has no seeds of its own that we know,
so the answer is about this number and not about its method.
"""

from collections.abc import Sequence

import numpy as np

from polarlm.verdict.comparison import BETTER, NOT_SHOWN, WORSE, Comparison, compare_with_number
from polarlm.verdict.family import adjust
from polarlm.verdict.groups import Group
from polarlm.verdict.judgement import Judgement, seed_losses
from polarlm.verdict.looks import Looks, pair_key
from polarlm.verdict.sentences import probability


def compare_published(
    groups: Sequence[Group], judgement: Judgement, number: float, planned: int | None = None, looks: Looks | None = None
) -> list[Comparison]:
    """Every group with a result against the number, corrected for the number of groups (Holm)."""
    measure, looks = judgement.measure, looks or Looks()
    truth = float(np.log(number)) if measure.is_log else number
    compared = []
    for group in groups:
        losses = seed_losses(group, measure)
        if not losses:
            continue
        key = f"{pair_key(group.runs[0], group.runs[0], measure.name)}:published {number:g}"
        seen = sum(bool(np.isfinite(loss)) for loss in losses.values())
        comparison = compare_with_number(
            group.label,
            losses,
            f"the published {number:g}",
            truth,
            looks=looks.before(key, seen),
            planned=planned,
            lower_is_better=measure.lower_is_better,
        )
        if not planned or seen >= planned:
            judgement.looked[key] = seen
        compared.append(comparison)
    return adjust(compared)


def published_sentence(comparison: Comparison, judgement: Judgement) -> str:
    """'polar: mean 27.61 (95 % interval 27.40 to 27.82, 5 seeds, one-sample t, p = 0.004): better than …'."""
    c, measure = comparison, judgement.measure
    back = np.exp if measure.is_log else float
    published = float(c.baseline.split()[-1])
    truth = float(np.log(published)) if measure.is_log else published
    d = c.difference
    mean = f"{c.treatment}: mean {back(d.mean + truth):.4g} {measure.title}"
    claim = {BETTER: f"better than {c.baseline}", WORSE: f"worse than {c.baseline}"}
    outcome = claim.get(c.outcome, f"{NOT_SHOWN} against {c.baseline}")
    if d.low is None or d.high is None or c.p_value is None:
        return f"{mean} ({d.method}): {NOT_SHOWN} against {c.baseline}; train at least three seeds."
    interval = f"95 % interval {back(d.low + truth):.4g} to {back(d.high + truth):.4g}"
    corrected = f" after Holm over {c.family} groups" if c.family > 1 else ""
    p = c.p_value if c.p_adjusted is None else c.p_adjusted
    lost = f" {c.diverged[0]} failed or diverged seeds are left out, so no win is claimed." if c.diverged[0] else ""
    return f"{mean} ({interval}; {d.n} seeds, {d.method}, p {probability(p)}{corrected}): {outcome}.{lost}"
