"""The rows of a part → chosen values, verdicts and curves, by the same statistics as everywhere else."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from polarlm.errors import UserError
from polarlm.runs.reading import Run
from polarlm.verdict.budget import Gain
from polarlm.verdict.comparison import Comparison, adjust, compare_seeds
from polarlm.verdict.evidence import Estimate, estimate_mean
from polarlm.verdict.groups import Group, group_runs
from polarlm.verdict.headline import headline
from polarlm.verdict.judgement import Judgement, judge_groups, seed_losses
from polarlm.verdict.measure import Measure
from polarlm.verdict.sentences import verdict
from study.jobs import best_value
from study.plan import Part, Question
from study.summaries import Summary, as_run


@dataclass(frozen=True)
class Line:
    """One variant of a part as the table shows it."""

    variant: str
    value: float | None  # of the tuned key
    tried: dict[float, float | None]  # tuned value → loss of the search
    rows: list[dict[str, Any]]  # the seeds that count
    losses: dict[int, float]
    mean: Estimate
    comparison: Comparison | None
    outcome: str
    sentence: str
    gains: tuple[Gain, ...] = ()

    @property
    def identities(self) -> frozenset[str]:
        """Which runs these are, wherever they are listed."""
        return frozenset(row["identity"] for row in self.rows)


@dataclass(frozen=True)
class JudgedPart:
    """What is said about a part."""

    measure: Measure
    lines: list[Line]
    finding: str
    notes: list[str]


def judge_part(question: Question, name: str, summary: Summary) -> JudgedPart | None:
    """Judge a part by its rows; None where no seed has been trained."""
    part, measure = question.parts[name], Measure(question.metric_of(question.parts[name]))
    values = {variant: chosen_value(summary, name, variant) for variant in part.variants}
    rows = {variant: seed_rows(summary, name, variant, values[variant]) for variant in part.variants}
    tune = question.tuning_of(part)
    runs: dict[str, list[Run]] = {}
    for variant, seed_runs in rows.items():
        settings = summary.settings.get((name, variant), {})
        tuned = {tune.key: values[variant]} if tune and values[variant] is not None else {}
        runs[variant] = [as_run(row, {**settings, **tuned}, measure.name) for row in seed_runs]
    groups = [labelled(variant, runs[variant]) for variant in part.variants if runs[variant]]
    if not groups:
        return None
    compare = previous if part.compare == "previous" else against_baseline
    verdicts, finding, notes = compare(question, part, groups, measure)
    lines = []
    for group in groups:
        comparison, outcome, sentence, gains = verdicts[group.label]
        losses = seed_losses(group, measure)
        mean = estimate_mean([v if math.isfinite(v) else None for v in losses.values()])
        label = group.label
        tried = tuning_losses(summary, name, label)
        lines.append(Line(label, values[label], tried, rows[label], losses, mean, comparison, outcome, sentence, gains))
    return JudgedPart(measure, lines, finding, [*notes, *versions_of_runs(rows)])


def tuning_losses(summary: Summary, part: str, variant: str) -> dict[float, float | None]:
    """Tuned value → validation loss of the search; inf of a run that failed."""
    return {
        row["value"]: row["val/loss"] if row["status"] == "finished" and row.get("val/loss") is not None else math.inf
        for row in sorted(summary.at(part, variant, "tune"), key=lambda r: r["value"])
    }


def chosen_value(summary: Summary, part: str, variant: str) -> float | None:
    """What the search chose; without one, the value that most seeds were trained with."""
    if (best := best_value(tuning_losses(summary, part, variant))) is not None:
        return best
    counts = Counter(row["value"] for row in summary.at(part, variant, "seeds") if row["value"] is not None)
    return min(counts, key=lambda value: (-counts[value], value)) if counts else None


def seed_rows(summary: Summary, part: str, variant: str, value: float | None) -> list[dict[str, Any]]:
    """The rows that count: the seeds at the chosen value."""
    ended = summary.at(part, variant, "seeds")
    return sorted((row for row in ended if row["value"] == value), key=lambda row: row["seed"])


def labelled(variant: str, runs: Sequence[Run]) -> Group:
    """All seeds of a variant as one group under the plan's own name for it."""
    (group,) = group_runs(runs)
    return replace(group, label=variant, block=variant)


Told = dict[str, tuple[Comparison | None, str, str, tuple[Gain, ...]]]


def against_baseline(
    question: Question, part: Part, groups: list[Group], measure: Measure
) -> tuple[Told, str, list[str]]:
    """Every variant against the one that the plan names."""
    labels = [group.label for group in groups]
    if part.baseline not in labels:
        return {label: (None, "not compared", "", ()) for label in labels}, f"{part.baseline} is still missing", []
    judgement: Judgement = judge_groups(
        groups,
        measure.name,
        part.baseline,
        margin=question.margin_of(part),
        planned_seeds=len(question.seeds_of(part)),
    )
    verdicts: Told = {
        row.group.label: (row.comparison, row.outcome, row.sentence, tuple(row.gains)) for row in judgement.rows
    }
    return verdicts, headline(judgement), list(judgement.notes)


def previous(question: Question, part: Part, groups: list[Group], measure: Measure) -> tuple[Told, str, list[str]]:
    """Every rung against the one before it, corrected for the number of steps."""
    steps = [
        compare_seeds(
            b.label,
            seed_losses(b, measure),
            a.label,
            seed_losses(a, measure),
            margin=question.margin_of(part),
            planned=len(question.seeds_of(part)),
            lower_is_better=measure.lower_is_better,
        )
        for a, b in pairwise(groups)
    ]
    adjusted = adjust(steps)
    verdicts: Told = {groups[0].label: (None, "first rung", "", ())}
    verdicts |= {c.treatment: (c, c.outcome, verdict(c, measure.unit), ()) for c in adjusted}
    shown = [f"{c.treatment} {c.outcome} than {c.baseline}" for c in adjusted if c.outcome in ("better", "worse")]
    finding = "; ".join(shown) if shown else "No step is shown to change anything"
    return verdicts, finding, []


def versions_of_runs(rows: Mapping[str, Sequence[dict[str, Any]]]) -> list[str]:
    """Which code and which torch made the runs."""
    every = [row for of_variant in rows.values() for row in of_variant]
    commits = sorted({row["commit"] for row in every if row.get("commit")})
    torches = sorted({str(row["torch"]) for row in every if row.get("torch")})
    made = [f"code {', '.join(commits)}"] if commits else []
    made += [f"torch {', '.join(torches)}"] if torches else []
    return [f"Made with {'; '.join(made)}."] if made else []


def check_known(question: Question, summary: Summary) -> None:
    """Refuse rows of parts or variants that the plan does not have: a table would silently leave them out."""
    for row in summary.rows:
        part = question.parts.get(row["part"])
        if part is None or row["variant"] not in part.variants:
            raise UserError(
                f"The summary of {question.name} has rows of {row['part']}/{row['variant']}, which configs/study/"
                f"{question.name}.yaml does not name; put it back into the plan, or take the rows out"
            )
