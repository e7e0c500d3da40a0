"""Two checkpoints on the same documents: how far would the difference move with other documents, and other seeds?

A loss on a corpus is a ratio of sums: nats of all documents over their bytes (or tokens). Differences are ours − theirs
in nats per unit of `sizes`; divide by ln 2 for bits.
"""

import math

import numpy as np
from scipy import stats

from polarlm.errors import UserError
from polarlm.verdict.estimates import Estimate
from polarlm.verdict.evidence import CONFIDENCE, Evidence

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
