"""Warnings about a set of runs, and whether two groups read the same text (by fingerprint, not by name)."""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from polarlm.runs.files import json_object
from polarlm.runs.reading import Run
from polarlm.verdict.groups import Group
from polarlm.verdict.measure import Measure


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
