"""Judge groups of runs: which loss, against which baseline, with which evidence, at what cost."""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from polarlm.runs.files import write_json
from polarlm.runs.reading import Run
from polarlm.verdict.budget import PROCESSOR, Budget, Gain, LossCurve, budget_gaps, gains, is_fair, unfair_reason
from polarlm.verdict.comparison import Comparison, adjust, compare_seeds
from polarlm.verdict.evidence import Estimate, estimate_mean
from polarlm.verdict.groups import Group, choose_baselines, is_compared, ladder
from polarlm.verdict.measure import Measure, choose_measure, default_margin
from polarlm.verdict.per_document import document_sentence
from polarlm.verdict.sentences import different_text, notes_about, verdict_parts

BASELINE, COMPARED, UNEQUAL, NOT_COMPARED = "baseline", "compared", "unequal budgets", "not compared"

LOOKS_FILE = ".looks.json"

# What the seconds of a budget may be, best first: recorded name → what it is.
CLOCKS = {
    "processor_seconds": "processor time without validation",
    "training_seconds": "training time without validation",
    "seconds": "time of the whole run, including validation",
}


class Looks:
    """The looks recorded beside the given runs; the empty record where there is none.

    A comparison that was seen before its last seeds were trained is no fixed-size test any more. `compare` notes every
    look in `.looks.json` beside the run folders: which pair of settings, on which number, with how many seeds. Seeds
    that join later are judged by the always-valid rule. A plan made before (`--seeds 5`) needs none of this: until its
    seeds are there no verdict is given, and looks without a verdict cost nothing.
    """

    def __init__(self, *folders: Path) -> None:
        self.every_time = False  # a trial looks after every seed, also the first time
        self.path = folders[0] / LOOKS_FILE if folders else None  # where new looks are noted
        self.seen: dict[str, list[int]] = {}
        for folder in folders:
            for key, numbers in _read_looks(folder / LOOKS_FILE).items():
                self.seen[key] = sorted({*self.seen.get(key, ()), *numbers})

    @classmethod
    def beside(cls, runs: Iterable[Run]) -> "Looks":
        """The records in the folders that hold the runs."""
        return cls(*dict.fromkeys(run.folder.parent for run in runs))

    def before(self, key: str, seeds: int) -> tuple[int, ...]:
        """Numbers of seeds, fewer than now, at which this comparison had a test that somebody saw."""
        if self.every_time:
            return tuple(range(1, max(seeds, 2)))
        return tuple(n for n in self.seen.get(key, ()) if 2 <= n < seeds)

    def record(self, looked: Mapping[str, int]) -> str | None:
        """Add looks; returns a sentence when they could not be written."""
        new = {key: sorted({*self.seen.get(key, ()), n}) for key, n in looked.items() if n >= 2}
        if not new or self.path is None or all(self.seen.get(k) == v for k, v in new.items()):
            return None
        self.seen |= new
        try:
            write_json(self.path, self.seen)
        except OSError as error:
            return f"This look could not be noted in {self.path} ({error.strerror}): later seeds will seem planned."
        return None


def _read_looks(path: Path) -> dict[str, list[int]]:
    try:
        looks = json.loads(path.read_text(encoding="utf-8"))
        return {str(key): [int(n) for n in numbers] for key, numbers in looks.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}  # absent or damaged: as if nobody had looked; the next look writes it again


def pair_key(ours: Run, theirs: Run, measure: str) -> str:
    """Equal for the same pair of settings on the same number, whatever else is on the page."""
    return f"{_settings_hash(ours)}:{_settings_hash(theirs)}:{measure}"


def _settings_hash(run: Run) -> str:
    kept = {key: value for key, value in run.settings.items() if is_compared(key)}
    return hashlib.sha256(json.dumps([run.block, kept], sort_keys=True, default=str).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Judged:
    """One line of the final table."""

    group: Group
    role: str  # baseline, compared, unequal budgets (shown in grey, not judged), not compared
    parts: tuple[str, ...]  # what is claimed, then how it is known and what it cost
    estimates: dict[str, Estimate]  # per metric name, over the judged seeds
    budget: Budget
    tokens_per_second: float | None = None
    comparison: Comparison | None = None  # also of unequal budgets, where it is no evidence
    gains: tuple[Gain, ...] = field(default=())  # weakest first
    head_size: int | None = None

    @property
    def sentence(self) -> str:
        """Everything that is said about this line."""
        return " ".join(self.parts)

    @property
    def outcome(self) -> str:
        """What may be said: baseline, better, worse, equivalent, no difference shown, unequal budgets, not compared."""
        return self.comparison.outcome if self.role == COMPARED and self.comparison else self.role


@dataclass(frozen=True)
class Step:
    """One rung of a ladder against the one before it."""

    group: int
    before: int
    comparison: Comparison


@dataclass(frozen=True)
class Judgement:
    """The final table, what it measures, and what a reader must know about it."""

    measure: Measure
    rows: list[Judged]
    steps: list[Step]  # of a ladder, else empty
    notes: list[str]
    one_tokenizer: bool
    margin: float | None
    looked: dict[str, int]  # comparisons that a reader of this judgement has seen, with their numbers of seeds
    clock: str  # of CLOCKS: which seconds the budgets count


def judge_groups(
    groups: Sequence[Group],
    metric: str | None = None,
    baseline: str | None = None,
    *,
    margin: float | None = None,
    planned_seeds: int | None = None,
    looks: Looks | None = None,
) -> Judgement:
    """Compare every group with its baseline on paired seeds, corrected for everything that is compared on the page."""
    runs = [run for group in groups for run in group.runs]
    measure = choose_measure(runs, metric)
    margin = default_margin(measure, runs) if margin is None else margin
    looks = looks or Looks()
    looked: dict[str, int] = {}

    def compare(group: Group, against: Group) -> Comparison:
        ours, theirs = seed_losses(group, measure), seed_losses(against, measure)
        key = pair_key(group.runs[0], against.runs[0], measure.name)
        n = len({s for s in ours if math.isfinite(ours[s])} & {s for s in theirs if math.isfinite(theirs[s])})
        result = compare_seeds(
            group.label,
            ours,
            against.label,
            theirs,
            margin=margin,
            looks=looks.before(key, n),
            planned=planned_seeds,
            lower_is_better=measure.lower_is_better,
        )
        if not planned_seeds or n >= planned_seeds:
            looked[key] = n
        return result

    baselines = choose_baselines(groups, baseline)
    clock = _clock(groups)
    budgets = [_budget(group, clock) for group in groups]
    refused, unequal, compared = _sort_out(groups, baselines, budgets, measure)
    greyed = {i: compare(groups[i], against) for i, against in unequal.items()}
    fair = {i: compare(groups[i], against) for i, against in compared.items()}
    # Everything that is compared on the page shares the error rate: the steps of a ladder too, each pair once.
    pairs = {(i, groups.index(against)): fair[i] for i, against in compared.items()}
    for a, b in ladder(groups):
        even = is_fair(budget_gaps(budgets[b], budgets[a]))
        if (b, a) not in pairs and even and not _refusal(groups[b], groups[a], measure):
            pairs[b, a] = compare(groups[b], groups[a])
    pairs = dict(zip(pairs, adjust(list(pairs.values()))))
    fair = {i: pairs[i, groups.index(against)] for i, against in compared.items()}
    rows = []
    for index, group in enumerate(groups):
        against = baselines[index]
        comparison = fair.get(index) or greyed.get(index)
        gained: list[Gain] = []
        if comparison is not None and against is not None:
            gaps = budget_gaps(budgets[index], budgets[groups.index(against)])
            head = (head_size(group), head_size(against))
            gained = gains(_curves(group, measure), _curves(against, measure), comparison.seeds)
        if index in fair and comparison is not None:
            role, parts = COMPARED, verdict_parts(comparison, measure.unit, gaps, gained, head)
            documents = document_sentence(group, against) if against is not None else None
            parts += [documents] if documents else []
        elif index in greyed and against is not None:
            role, parts = UNEQUAL, [f"{group.label}: not judged against {against.label}: {unfair_reason(gaps)}."]
        elif against is group and len(groups) > 1:
            role, parts = BASELINE, [f"{group.label} is the baseline."]
        else:
            role = NOT_COMPARED
            parts = [refused.get(index, f"{group.label}: not compared, there is no baseline with equal settings.")]
        speed = estimate_mean([s for run in group.runs if (s := run.number("tokens_per_second"))])
        rows.append(
            Judged(
                group,
                role,
                tuple(parts),
                {name: _estimate(group, Measure(name)) for name in measure.siblings()},
                budgets[index],
                speed.mean if speed.n else None,
                comparison,
                tuple(gained),
                head_size(group),
            )
        )
    one_tokenizer = len({run.tokenizer for run in runs}) == 1
    return Judgement(
        measure,
        rows,
        [Step(b, a, pairs[b, a]) for a, b in ladder(groups) if (b, a) in pairs],
        notes_about(groups, measure, one_tokenizer),
        one_tokenizer,
        margin,
        looked,
        clock,
    )


def seed_losses(group: Group, measure: Measure) -> dict[int, float]:
    """The final number of each seed; nan where a run failed or diverged. Runs that are not over are not judged."""
    losses: dict[int, float] = {}
    for run in group.runs:
        if run.status in ("finished", "failed") and not (run.seed in losses and run.status == "failed"):
            value = measure.value(run) if run.status == "finished" else None
            losses[run.seed] = math.nan if value is None else value
    return losses


def head_size(group: Group) -> int | None:
    """Channels of a head, which people forget when they compare blocks."""
    width, heads = (group.runs[0].settings.get(f"model.{key}") for key in ("d_model", "n_head"))
    return int(width) // int(heads) if isinstance(width, int) and isinstance(heads, int) and heads else None


def _sort_out(
    groups: Sequence[Group], baselines: Sequence[Group | None], budgets: Sequence[Budget], measure: Measure
) -> tuple[dict[int, str], dict[int, Group], dict[int, Group]]:
    """Which groups are refused (with the reason), which have unequal budgets, and which are compared."""
    refused: dict[int, str] = {}
    unequal: dict[int, Group] = {}
    compared: dict[int, Group] = {}
    for index, (group, against) in enumerate(zip(groups, baselines)):
        if against is None or against is group:
            continue
        reason = _refusal(group, against, measure)
        if reason:
            refused[index] = f"{group.label}: not compared with {against.label}: {reason}"
        elif not is_fair(budget_gaps(budgets[index], budgets[groups.index(against)])):
            unequal[index] = against
        else:
            compared[index] = against
    return refused, unequal, compared


def _refusal(group: Group, against: Group, measure: Measure) -> str | None:
    for side in (group, against):
        if not seed_losses(side, measure):
            return f"{side.label} has no finished run yet."
    for part, word in (
        ("data", "other data"),
        ("tokenizer", "another tokenizer, so losses per token mean other things"),
    ):
        if part == "tokenizer" and measure.comparable:
            continue
        ours = {k: v for k, v in group.varied.items() if k.partition(".")[0] == part}
        theirs = {k: v for k, v in against.varied.items() if k.partition(".")[0] == part}
        if ours != theirs:
            return f"it uses {word}."
    return different_text(group, against)


def _estimate(group: Group, measure: Measure) -> Estimate:
    """Perplexities are averaged as logarithms and shown as perplexities."""
    finished = [run for run in group.runs if run.status == "finished"]
    if finished:
        values = list(seed_losses(group, measure).values())
    else:
        values = [v for run in group.runs if (v := measure.value(run)) is not None]
    return estimate_mean([math.exp(v) for v in values], log=True) if measure.is_log else estimate_mean(values)


def _mean(runs: Sequence[Run], read: Callable[[Run], float | None]) -> float | None:
    known = [value for run in runs if (value := read(run))]
    return sum(known) / len(known) if known else None


def _counted(group: Group) -> list[Run]:
    return [run for run in group.runs if run.status == "finished"] or list(group.runs)


def _clock(groups: Sequence[Group]) -> str:
    """The first of CLOCKS that all runs know."""
    runs = [run for group in groups for run in _counted(group)]
    return next((name for name in CLOCKS if all(run.number(name) for run in runs)), "seconds")


def _budget(group: Group, clock: str) -> Budget:
    runs = _counted(group)
    return Budget(
        parameters=_mean(runs, lambda run: run.number("parameters")),
        tokens=_mean(runs, lambda run: run.number("tokens")),
        flops=_mean(runs, lambda run: run.flops),
        seconds=_mean(runs, lambda run: run.number(clock)),
    )


def _curves(group: Group, measure: Measure) -> dict[int, LossCurve]:
    """The validation curve of each finished seed; the curve's own metric is validation, whatever split is judged."""
    name = f"val/{measure.key}"
    curves = {}
    for run in group.runs:
        if run.status != "finished" or name not in run.metrics.columns or not measure.lower_is_better:
            continue
        stream = run.metrics.stream(name)
        losses = np.log(stream[name]) if measure.is_log else stream[name]
        per_token = run.number("flops_per_token")
        flops = stream["tokens"] * per_token if per_token else stream["flops"]
        costs = {"tokens": stream["tokens"], "FLOPs": flops, "seconds": stream["seconds"]}
        curves[run.seed] = LossCurve(costs | {PROCESSOR: stream["processor_seconds"]}, losses)
    return curves
