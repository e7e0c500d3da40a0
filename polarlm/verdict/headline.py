"""The finding in one line; it names the weakest currency, not the strongest, and ranks nobody without evidence."""

from collections.abc import Sequence

from polarlm.verdict.comparison import BETTER, EQUIVALENT, NOT_SHOWN, WORSE
from polarlm.verdict.judgement import COMPARED, UNEQUAL, Judged, Judgement
from polarlm.verdict.sentences import listed


def headline(judgement: Judgement) -> str:
    """The finding in one line, for the top of the page and the title of its first figure."""
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
    # Who wins in every currency must not stand under the reservation that another one needs.
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
    """At equal what, at least: the currency in which the winner gained least."""
    words = set()
    for row in rows:
        if not row.gains:
            return " at equal tokens"
        weakest = row.gains[0]
        words.add((weakest.currency, weakest.outcome))
    if len(words) > 1:
        return ", not by every currency" if any(outcome != BETTER for _, outcome in words) else " by every currency"
    currency, outcome = words.pop()
    if outcome == BETTER:
        factor = min(row.gains[0].factor.mean for row in rows)
        return f", at equal {currency} too (at least {factor:.2f}×)"
    if outcome == WORSE:
        factor = max(row.gains[0].factor.mean for row in rows)
        return f" at equal tokens, but not at equal {currency} ({factor:.2f}×)"
    # Of equal tokens the losses themselves speak; what their curves add must not contradict it.
    return " at equal tokens" + (f", not shown at equal {currency}" if currency != "tokens" else "")


def _labels(rows: Sequence[Judged]) -> str:
    return f"{len(rows)} groups" if len(rows) > 4 else listed([row.group.label for row in rows])
