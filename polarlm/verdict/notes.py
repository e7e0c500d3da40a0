"""What a reader must know about a set of runs before believing anything that is said about them."""

from collections import Counter
from collections.abc import Sequence

from polarlm.runs.reading import Run
from polarlm.verdict.groups import Group
from polarlm.verdict.measure import Measure
from polarlm.verdict.provenance import version_notes


def notes_about(groups: Sequence[Group], measure: Measure, one_tokenizer: bool) -> list[str]:
    """Warnings about tokenizers, unfinished, diverged, repeated and undertrained runs, versions, damaged files."""
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
    lost = [run.name for run in runs if run.status == "finished" and measure.value(run) is None]
    if lost:
        notes.append(f"Without a finite {measure.name}: {_some(lost)}.")
    doubles = [g.label for g in groups if len(set(g.seeds)) < len(g.runs)]
    if doubles:
        notes.append(f"Several runs of one seed in {', '.join(doubles)}: the last finished one of each seed is judged.")
    if max((len(set(g.seeds)) for g in groups), default=0) == 1:
        notes.append("One seed per group: no interval exists, and no difference can be shown.")
    weak = undertrained(runs)
    if weak:
        notes.append(f"Undertrained, worse than a bigram table of the training text: {_some(weak)}.")
    notes += version_notes(runs)
    notes += [f"{run.name}: {problem}" for run in runs for problem in run.problems][:10]
    return notes


def undertrained(runs: Sequence[Run]) -> list[str]:
    """Names of finished runs whose validation loss is above that of the bigram baseline."""
    names = []
    for run in runs:
        bigram, loss = _baselines(run).get("bigram", {}).get("loss"), run.number("val/loss")
        if run.status == "finished" and bigram and loss and loss > bigram:
            names.append(run.name)
    return names


def reference_losses(groups: Sequence[Group], key: str) -> dict[str, float]:
    """What simple predictors (unigram, bigram) reach on validation, where all runs agree about it."""
    losses: dict[str, set[float]] = {}
    for run in (run for group in groups for run in group.runs):
        for name, numbers in _baselines(run).items():
            if isinstance(numbers.get(key), (int, float)):
                losses.setdefault(name, set()).add(round(float(numbers[key]), 6))
    return {name: values.pop() for name, values in losses.items() if len(values) == 1}


def _baselines(run: Run) -> dict[str, dict[str, float]]:
    baselines = run.summary.get("baselines")
    return {str(k): v for k, v in baselines.items() if isinstance(v, dict)} if isinstance(baselines, dict) else {}


def _some(names: Sequence[str]) -> str:
    return f"{', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
