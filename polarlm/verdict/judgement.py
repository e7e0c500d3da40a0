"""Groups of runs → judged numbers: which loss, against which baseline, with which evidence."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from polarlm.errors import UserError
from polarlm.runs.reading import Run
from polarlm.verdict.groups import Group
from polarlm.verdict.statistics import (
    NO_DIFFERENCE,
    Budget,
    Comparison,
    Estimate,
    adjust,
    budget_gaps,
    compare_seeds,
    estimate_mean,
    verdict,
)

UNITS = {"bits_per_byte": "bits per byte", "loss": "nats per token", "perplexity": "perplexity"}
# Preferred first; the first that every finished run has is judged.
METRICS = ("test/bits_per_byte", "val/bits_per_byte", "test/loss", "val/loss")


@dataclass(frozen=True)
class Judged:
    """One line of the final table."""

    group: Group
    estimates: dict[str, Estimate]  # per metric name, over the judged seeds
    budget: Budget
    tokens_per_second: float | None
    comparison: Comparison | None  # None for the baseline and where no comparison is fair
    sentence: str

    @property
    def outcome(self) -> str:
        """baseline, better, worse, no difference shown, or not compared."""
        if self.comparison is not None:
            return self.comparison.outcome
        return "baseline" if self.sentence.endswith("is the baseline.") else "not compared"


@dataclass(frozen=True)
class Judgement:
    """The final table, what it measures, and what a reader must know about it."""

    metric: str
    rows: list[Judged]
    notes: list[str]
    one_tokenizer: bool

    @property
    def unit(self) -> str:
        return UNITS.get(self.metric.rpartition("/")[2], self.metric)

    @property
    def split(self) -> str:
        return {"val": "validation", "test": "test"}.get(self.metric.partition("/")[0], self.metric.partition("/")[0])

    def shown_metrics(self) -> list[str]:
        """The judged loss first, then bits per byte and perplexity of the same split (loss is log perplexity)."""
        split = self.metric.partition("/")[0]
        return list(dict.fromkeys((self.metric, f"{split}/bits_per_byte", f"{split}/perplexity")))


def judge_groups(groups: Sequence[Group], metric: str | None = None, baseline: str | None = None) -> Judgement:
    """Compare every group with its baseline on paired seeds, corrected for the number of comparisons."""
    metric = metric or _choose_metric([run for group in groups for run in group.runs])
    one_tokenizer = len({run.tokenizer for group in groups for run in group.runs}) == 1
    baselines = _baselines(groups, baseline)
    comparisons: dict[int, Comparison] = {}
    refused: dict[int, str] = {}
    for index, group in enumerate(groups):
        against = baselines[index]
        if against is None or against is group:
            continue
        reason = _not_comparable(group, against, metric)
        if reason:
            refused[index] = f"{group.label}: not compared with {against.label}: {reason}"
        else:
            comparisons[index] = compare_seeds(
                group.label, seed_losses(group, metric), against.label, seed_losses(against, metric)
            )
    adjusted = dict(zip(comparisons, adjust(list(comparisons.values()))))
    unit = UNITS.get(metric.rpartition("/")[2], metric)
    rows = []
    for index, group in enumerate(groups):
        against, comparison = baselines[index], adjusted.get(index)
        if comparison is not None and against is not None:
            sentence = verdict(comparison, unit, budget_gaps(_budget(group), _budget(against)))
        elif against is group and len(groups) > 1:
            sentence = f"{group.label} is the baseline."
        else:
            sentence = refused.get(index, f"{group.label}: not compared, there is no baseline with equal settings.")
        speed = estimate_mean([s for run in group.runs if (s := run.number("tokens_per_second"))])
        rows.append(
            Judged(
                group,
                {m: _estimate(group, m) for m in dict.fromkeys((metric, *_same_split(metric)))},
                _budget(group),
                speed.mean if speed.n else None,
                comparison,
                sentence,
            )
        )
    return Judgement(metric, rows, _notes(groups, one_tokenizer, metric), one_tokenizer)


def seed_losses(group: Group, metric: str) -> dict[int, float]:
    """The final loss of each seed; nan where a run failed or diverged. Runs that are not over are not judged."""
    losses: dict[int, float] = {}
    for run in group.runs:
        if run.status in ("finished", "failed") and not (run.seed in losses and run.status == "failed"):
            value = run.number(metric) if run.status == "finished" else None
            losses[run.seed] = math.nan if value is None else value
    return losses


def _choose_metric(runs: Sequence[Run]) -> str:
    finished = [run for run in runs if run.status == "finished"] or list(runs)

    def known(metric: str) -> bool:
        return any(run.number(metric) is not None for run in finished)

    def has(run: Run, metric: str) -> bool:
        # A diverged run says null, which is an answer; a run without the key does not know the metric.
        return metric in run.summary or run.number(metric) is not None

    for metric in METRICS:
        if known(metric) and all(has(run, metric) for run in finished):
            return metric
    return next((metric for metric in reversed(METRICS) if known(metric)), "val/loss")


def _baselines(groups: Sequence[Group], wanted: str | None) -> list[Group | None]:
    """The baseline of every group: the wanted (or `standard`) block in equal surroundings, else the only candidate."""
    if len(groups) < 2:
        return [None] * len(groups)
    if wanted is not None:
        candidates = [g for g in groups if wanted in (g.block, g.label)] or [g for g in groups if wanted in g.label]
        if not candidates:
            raise UserError(
                f"--baseline {wanted!r} is no block or group here; choose one of: {', '.join(g.label for g in groups)}"
            )
    else:
        # `groups` is sorted with the standard block first.
        candidates = [g for g in groups if g.block == groups[0].block]
        if len(candidates) == len(groups):  # an ablation of one block: its first variant stands for it
            candidates = candidates[:1]
    found: list[Group | None] = []
    for group in groups:
        alike = [c for c in candidates if c is group] or [
            c for c in candidates if c.surroundings() == group.surroundings()
        ]
        found.append(alike[0] if alike else candidates[0] if len(candidates) == 1 else None)
    return found


def _not_comparable(group: Group, against: Group, metric: str) -> str | None:
    for side in (group, against):
        if not seed_losses(side, metric):
            return f"{side.label} has no finished run yet."
    for part, word in (
        ("data", "other data"),
        ("tokenizer", "another tokenizer, so losses per token mean other things"),
    ):
        if part == "tokenizer" and metric.endswith("bits_per_byte"):
            continue
        ours = {k: v for k, v in group.varied.items() if k.partition(".")[0] == part}
        theirs = {k: v for k, v in against.varied.items() if k.partition(".")[0] == part}
        if ours != theirs:
            return f"it uses {word}."
    return None


def _same_split(metric: str) -> list[str]:
    split = metric.partition("/")[0]
    return [f"{split}/{key}" for key in UNITS]


def _estimate(group: Group, metric: str) -> Estimate:
    if any(run.status == "finished" for run in group.runs):
        return estimate_mean(list(seed_losses(group, metric).values()))
    return estimate_mean([v for run in group.runs if (v := run.number(metric)) is not None])


def _budget(group: Group) -> Budget:
    runs = [run for run in group.runs if run.status == "finished"] or list(group.runs)

    def mean(values: list[float | None]) -> float | None:
        known = [v for v in values if v]
        return sum(known) / len(known) if known else None

    return Budget(
        parameters=mean([run.number("parameters") for run in runs]),
        tokens=mean([run.number("tokens") for run in runs]),
        flops=mean([run.flops for run in runs]),
    )


def _notes(groups: Sequence[Group], one_tokenizer: bool, metric: str) -> list[str]:
    runs = [run for group in groups for run in group.runs]
    notes = []
    if not one_tokenizer:
        notes.append(
            "The runs use different tokenizers: perplexity and loss count other tokens and are not comparable. "
            "Compare bits per byte."
        )
    states = Counter(run.status for run in runs if run.status != "finished")
    if states:
        words = ", ".join(f"{count} {status}" for status, count in sorted(states.items()))
        notes.append(f"Not finished: {words}. Runs that are not over are drawn but not judged.")
    lost = [run.name for run in runs if run.status == "finished" and run.number(metric) is None]
    if lost:
        notes.append(f"Without a finite {metric}: {', '.join(lost[:5])}{' …' if len(lost) > 5 else ''}.")
    doubles = [g.label for g in groups if len(set(g.seeds)) < len(g.runs)]
    if doubles:
        notes.append(f"Several runs of one seed in {', '.join(doubles)}: the last finished one of each seed is judged.")
    if max((len(set(g.seeds)) for g in groups), default=0) == 1:
        notes.append("One seed per group: no interval exists, and no difference can be shown.")
    notes += [f"{run.name}: {problem}" for run in runs for problem in run.problems][:10]
    return notes


def reference_losses(groups: Sequence[Group], metric: str) -> dict[str, float]:
    """What simple predictors (unigram, bigram) reach, where all runs agree about it."""
    key = metric.rpartition("/")[2]
    found: dict[str, set[float]] = {}
    for run in (run for group in groups for run in group.runs):
        for name, losses in (run.summary.get("baselines") or {}).items():
            if isinstance(losses, dict) and isinstance(losses.get(key), (int, float)):
                found.setdefault(str(name), set()).add(round(float(losses[key]), 6))
    return {name: values.pop() for name, values in found.items() if len(values) == 1}


def headline(judgement: Judgement) -> str:
    """The finding in one line, for the top of the page and the title of the curves."""
    compared = [row for row in judgement.rows if row.comparison is not None]
    judged = [row for row in judgement.rows if row.estimates[judgement.metric].n]
    if not judged:
        return "No run has a result yet"
    if not compared:
        best = judged[0].estimates[judgement.metric]
        return (
            f"{judged[0].group.label}: {best.mean:.4g} {judgement.unit}"
            if len(judged) == 1
            else "Nothing to compare with"
        )
    better = [row.group.label for row in compared if row.outcome == "better"]
    worse = [row.group.label for row in compared if row.outcome == "worse"]
    baselines = {row.comparison.baseline for row in compared if row.comparison}
    against = next(iter(baselines)) if len(baselines) == 1 else "their baselines"
    parts = []
    if better:
        parts.append(f"{_list(better)}: lower {judgement.unit} than {against}")
    if worse:
        parts.append(f"{_list(worse)}: higher {judgement.unit} than {against}")
    if not parts:
        return f"{NO_DIFFERENCE.capitalize()} between {_list([row.group.label for row in compared])} and {against}"
    same = [row.group.label for row in compared if row.outcome == NO_DIFFERENCE]
    if same:
        parts.append(f"{NO_DIFFERENCE} for {_list(same)}")
    return "; ".join(parts)


def _list(labels: Sequence[str]) -> str:
    if len(labels) > 4:
        return f"{len(labels)} groups"
    return " and ".join([", ".join(labels[:-1]), labels[-1]] if len(labels) > 1 else labels)
