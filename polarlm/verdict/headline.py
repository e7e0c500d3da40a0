"""The finding in one line (`headline`), and the answer of `compare --published 28.01`.

The headline names the budget with the smallest gain and ranks nothing without evidence. A published number is compared
with the mean of our seeds by Student's one-sample t: it has no seeds of its own that we know, so the answer is about
this number and not about its method.
"""

from collections.abc import Sequence

import numpy as np

from polarlm.verdict.comparison import BETTER, EQUIVALENT, NOT_SHOWN, WORSE, Comparison, adjust, compare_with_number
from polarlm.verdict.groups import Group
from polarlm.verdict.judgement import COMPARED, UNEQUAL, Judged, Judgement, Looks, pair_key, seed_losses
from polarlm.verdict.sentences import listed, probability, undertrained


def headline(judgement: Judgement) -> str:
    """The finding in one line, for the top of the page and the title of its first figure."""
    finished = [run for row in judgement.rows for run in row.group.runs if run.status == "finished"]
    if finished and len(undertrained(finished)) == len(finished):
        return f"Undertrained, every run is worse than a bigram table: {_finding(judgement)}"
    return _finding(judgement)


def _finding(judgement: Judgement) -> str:
    judged = [row for row in judgement.rows if row.estimates[judgement.measure.name].n]
    compared = [row for row in judgement.rows if row.role == COMPARED and row.comparison is not None]
    if not judged:
        return "No run has a result yet"
    if not compared:
        if any(row.role == UNEQUAL for row in judgement.rows):
            return "Unequal budgets: nothing here can be judged"
        if len(judged) > 1:
            return "Nothing to compare with"
        best = judged[0].estimates[judgement.measure.name]
        return f"{judged[0].group.label}: {best.mean:.4g} {judgement.measure.title}"
    what = judgement.measure.title
    lower, higher = ("lower", "higher") if judgement.measure.lower_is_better else ("higher", "lower")
    parts = []
    better = [row for row in compared if row.outcome == BETTER]
    always = [row for row in better if row.gains and all(gain.outcome == BETTER for gain in row.gains)]
    # A block that wins at every budget is listed apart from blocks that need a reservation.
    for rows in (always, [row for row in better if row not in always]):
        if rows:
            parts.append(f"{_labels(rows)}: {lower} {what} than {_baseline(rows)}{_weakest(rows)}")
    worse = [row for row in compared if row.outcome == WORSE]
    if worse:
        parts.append(f"{_labels(worse)}: {higher} {what} than {_baseline(worse)}")
    same = [row for row in compared if row.outcome == EQUIVALENT]
    if same and judgement.margin:
        parts.append(f"{_labels(same)}: within {judgement.margin:.3g} {judgement.measure.unit} of {_baseline(same)}")
    open_ = [row for row in compared if row.outcome == NOT_SHOWN]
    if open_:
        # Not "between A and B and C": who is compared with whom has to be clear.
        parts.append(f"{_labels(open_)}: {NOT_SHOWN} against {_baseline(open_)}")
    return "; ".join(parts)


def _baseline(rows: Sequence[Judged]) -> str:
    baselines = {row.comparison.baseline for row in rows if row.comparison}
    return baselines.pop() if len(baselines) == 1 else "their baselines"


def _weakest(rows: Sequence[Judged]) -> str:
    """The budget at which the winners gain least, with the interval of the smallest gain."""
    words = set()
    for row in rows:
        if not row.gains:
            return " at equal tokens"
        weakest = row.gains[0]
        words.add((weakest.currency, weakest.outcome))
    if len(words) > 1:
        return ", not at every budget" if any(outcome != BETTER for _, outcome in words) else " at every budget"
    currency, outcome = words.pop()
    gains = [row.gains[0].factor for row in rows]
    if outcome == BETTER:
        least = min(gains, key=lambda factor: factor.low or 0)
        several = "smallest gain " if len(rows) > 1 else ""
        return f", at equal {currency} too ({several}{least.mean:.2f}×, 95 % interval {least.low:.2f}–{least.high:.2f})"
    if outcome == WORSE:
        most = max(gains, key=lambda factor: factor.mean)
        return f" at equal tokens, but not at equal {currency} ({most.mean:.2f}×)"
    # At equal tokens the final losses decide; the gain read off their curves must not contradict them.
    return " at equal tokens" + (f", not shown at equal {currency}" if currency != "tokens" else "")


def _labels(rows: Sequence[Judged]) -> str:
    return f"{len(rows)} groups" if len(rows) > 4 else listed([row.group.label for row in rows])


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
    lost = (
        f" {c.diverged[0]} failed or diverged seeds are left out, so it cannot be declared better."
        if c.diverged[0]
        else ""
    )
    return f"{mean} ({interval}; {d.n} seeds, {d.method}, p {probability(p)}{corrected}): {outcome}.{lost}"
