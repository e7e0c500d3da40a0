"""Documents as a second sample: what `eval.py protocol=documents` kept, for the runs of two groups.

This is said beside a verdict and does not decide it: the verdict speaks of this text, this of text like it.
"""

import math
from typing import Any

import numpy as np

from polarlm.data.atomic import ExpandsTooFar
from polarlm.runs.evaluations import read_arrays, read_evaluations
from polarlm.runs.reading import Run
from polarlm.verdict.documents import compare_documents, compare_seeds_and_documents
from polarlm.verdict.groups import Group
from polarlm.verdict.sentences import signed

# Two runs answered the same question when these agree.
QUESTION = ("data", "split", "corpus", "context", "stride")


def document_sentence(group: Group, against: Group) -> str | None:
    """The difference over documents (and seeds) in bits per byte; None where runs were not asked per document."""
    ours, theirs = ({run.seed: losses for run in g.runs if (losses := _losses(run))} for g in (group, against))
    seeds = sorted(set(ours) & set(theirs))
    questions = {question for side in (ours, theirs) for seed in seeds for question in side[seed]}
    common = [q for q in sorted(questions) if all(q in side[s] for side in (ours, theirs) for s in seeds)]
    if not seeds or not common:
        return None
    question = common[-1]
    a, b = (np.stack([side[s][question]["nats"] for s in seeds]) / math.log(2) for side in (ours, theirs))
    sizes = ours[seeds[0]][question]["bytes"]
    where = f"{len(sizes)} documents"
    if len(sizes) < 2:
        return None
    if len(seeds) == 1:
        one = compare_documents(a[0], b[0], sizes)
        if one.low is None or one.high is None:
            return None
        mean, low, high = one.mean, one.low, one.high
        how = f"{where} of seed {seeds[0]}, bootstrap over documents: it speaks of these two checkpoints"
    else:
        evidence = compare_seeds_and_documents(a, b, sizes)
        mean, (low, high) = evidence.mean, evidence.interval()
        how = f"{where} × {len(seeds)} seeds, both as samples"
    return f"On text like this: {signed(mean)} bits per byte (95 % interval {signed(low)} to {signed(high)}; {how})."


def _losses(run: Run) -> dict[str, dict[str, Any]]:
    """question → arrays of losses per document."""
    try:
        records = read_evaluations(run.folder, "documents")
        losses = {}
        for record in records:
            arrays = read_arrays(run.folder, record)
            if {"nats", "bytes"} <= set(arrays):
                losses[str([record["protocol"].get(key) for key in QUESTION])] = arrays
        return losses
    except ExpandsTooFar:
        raise
    except (OSError, ValueError, KeyError, TypeError):
        return {}  # damaged or half-written records say nothing
