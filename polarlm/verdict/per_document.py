"""Comparisons over documents, from the records of `eval.py protocol=documents` for the runs of two groups.

This adds to a verdict and does not decide it: a verdict holds for this text, a comparison over documents for similar
text. A loss on a
corpus is a ratio of sums: nats of all documents over their bytes (or tokens). Differences are ours − theirs in nats per
unit of `sizes`; divide by ln 2 for bits.
"""

import math
from typing import Any

import numpy as np
from scipy import stats

from polarlm.data.atomic import ExpandsTooFar
from polarlm.errors import UserError
from polarlm.runs.measurements import read_arrays, read_evaluations
from polarlm.runs.reading import Run
from polarlm.verdict.evidence import CONFIDENCE, Estimate, Evidence
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


RESAMPLES = 9_999


def compare_documents(ours: np.ndarray, theirs: np.ndarray, sizes: np.ndarray) -> Estimate:
    """Two checkpoints by the summed loss of each document (documents,): BCa bootstrap over documents.

    The interval speaks of these two checkpoints on text like this, not of the settings that they were trained with.
    """
    ours, theirs, sizes = (np.asarray(x, dtype=float) for x in (ours, theirs, sizes))
    _check(ours, theirs, sizes)
    differences = ours - theirs
    total = float(differences.sum() / sizes.sum())
    if len(sizes) < 2:
        return Estimate(total, None, None, len(sizes), "one document")

    def ratio(difference: np.ndarray, size: np.ndarray, axis: int = -1) -> np.ndarray:
        return difference.sum(axis=axis) / size.sum(axis=axis)

    if np.ptp(differences - total * sizes) == 0:
        return Estimate(total, None, None, len(sizes), "identical documents")
    interval = stats.bootstrap(
        (differences, sizes),
        ratio,
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        batch=max(1, 2_000_000 // len(sizes)),  # resamples held in memory at once
        confidence_level=CONFIDENCE,
        random_state=np.random.default_rng(0),
    ).confidence_interval
    return Estimate(total, float(interval.low), float(interval.high), len(sizes), "document bootstrap")


def compare_seeds_and_documents(ours: np.ndarray, theirs: np.ndarray, sizes: np.ndarray) -> Evidence:
    """Two settings by the summed loss of each seed's run on each document (seeds, documents): both are samples.

    Seeds and documents are crossed (every run reads every document), so the variance of the mean is
    (MS_seeds + MS_documents − MS_rest) / (seeds · documents), with Satterthwaite's degrees of freedom. A bootstrap of
    three seeds would be far too narrow.
    """
    ours, theirs, sizes = (np.asarray(x, dtype=float) for x in (ours, theirs, sizes))
    _check(ours, theirs, sizes)
    if ours.ndim != 2 or min(ours.shape) < 2:
        raise UserError("seeds × documents need at least two seeds and two documents of each setting")
    seeds, documents = ours.shape
    differences = ours - theirs
    total = float(differences.sum() / (seeds * sizes.sum()))
    # Each document's contribution to the ratio of sums: its mean over both axes is 0, its spread is the error.
    part = (differences - total * sizes) * documents / sizes.sum()
    rows, columns = part.mean(axis=1), part.mean(axis=0)
    rest = part - rows[:, None] - columns[None, :]
    freedoms = np.array([seeds - 1, documents - 1, (seeds - 1) * (documents - 1)], dtype=float)
    squares = np.array([documents * (rows**2).sum(), seeds * (columns**2).sum(), (rest**2).sum()]) / freedoms
    # A negative component means that the rest explains all of it.
    variance = max(float(squares[0] + squares[1] - squares[2]), float(squares.max()))
    freedom = variance**2 / float((squares**2 / freedoms).sum())
    return Evidence(total, math.sqrt(variance / (seeds * documents)), max(freedom, float(freedoms.min())), float(seeds))


def _check(ours: np.ndarray, theirs: np.ndarray, sizes: np.ndarray) -> None:
    if ours.shape != theirs.shape or ours.shape[-1] != len(sizes):
        raise UserError(
            f"per-document losses do not belong together: {ours.shape} and {theirs.shape} losses "
            f"of {len(sizes)} documents"
        )
