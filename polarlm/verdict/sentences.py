"""A comparison in words: the claim, its evidence, its power and its cost; and warnings about a set of runs."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from polarlm.runs.files import json_object
from polarlm.runs.reading import Run
from polarlm.verdict.budget import Gain, describe_budgets
from polarlm.verdict.comparison import EQUIVALENT, NOT_SHOWN, Comparison, seeds_to_decide, smallest_effect
from polarlm.verdict.evidence import ALPHA
from polarlm.verdict.groups import Group
from polarlm.verdict.measure import Measure


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


# -- warnings about a set of runs, and whether two groups read the same text (by fingerprint, not by name) ------------


def notes_about(groups: Sequence[Group], measure: Measure, one_tokenizer: bool) -> list[str]:
    """Warnings about tokenizers, unfinished, diverged, repeated and undertrained runs, versions, damaged files."""
    runs = [run for group in groups for run in group.runs]
    notes = []
    if not one_tokenizer:
        notes.append(
            "The runs use different tokenizers: perplexity and loss are per token and not comparable. "
            "Compare bits per byte."
        )
    states = Counter(run.status for run in runs if run.status != "finished")
    if states:
        words = ", ".join(f"{count} {status}" for status, count in sorted(states.items()))
        notes.append(f"Not finished: {words}. Unfinished runs are drawn but not judged.")
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
    """Validation losses of the unigram and bigram baselines, if all runs have the same."""
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


def different_text(group: Group, against: Group) -> str | None:
    """Why the runs of two groups did not all read the same text, or None."""
    corpora = [corpus for run in (*group.runs, *against.runs) if (corpus := _corpus(run))]
    # The fingerprint covers the tokenizer too; runs of different tokenizers are held to documents and bytes.
    one_tokenizer = len({json.dumps(c.get("tokenizer"), sort_keys=True) for c in corpora}) <= 1
    prints = [c["fingerprint"] if one_tokenizer else _sizes(c) for c in corpora]
    if len(set(prints)) <= 1:
        return None
    ours = {p["fingerprint"][:12] for run in group.runs if (p := _corpus(run))}
    theirs = {p["fingerprint"][:12] for run in against.runs if (p := _corpus(run))}
    names = {str((run.config.get("choices") or {}).get("data")) for run in (*group.runs, *against.runs)}
    called = f" although both are called {names.pop()}" if len(names) == 1 else ""
    return (
        f"the text differs{called} (corpus fingerprints {', '.join(sorted(ours))} against {', '.join(sorted(theirs))})."
    )


def version_notes(runs: Sequence[Run]) -> list[str]:
    """Sentences about runs made by different code or different torch versions."""
    notes = []
    environments = [json_object(run.folder / "environment.json") for run in runs]
    commits = sorted({str(e["git_commit"])[:9] for e in environments if e.get("git_commit")})
    if len(commits) > 1:
        notes.append(f"The runs were made by {len(commits)} versions of the code ({', '.join(commits[:4])}).")
    torches = sorted({str((e.get("versions") or {}).get("torch")) for e in environments if e.get("versions")})
    if len(torches) > 1:
        notes.append(f"The runs were made with different versions of torch ({', '.join(torches[:4])}).")
    changed = sum(bool(e.get("git_dirty")) for e in environments)
    if changed:
        notes.append(f"{changed} of {len(runs)} runs were made by code with uncommitted changes.")
    return notes


def _sizes(corpus: dict[str, Any]) -> str:
    splits = corpus.get("splits") or {}
    return json.dumps({name: (s.get("documents"), s.get("bytes")) for name, s in sorted(splits.items())})


def _corpus(run: Run) -> dict[str, Any]:
    corpus = json_object(run.folder / "corpus.json")
    return corpus if isinstance(corpus.get("fingerprint"), str) else {}
