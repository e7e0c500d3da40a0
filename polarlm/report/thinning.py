"""Curves thinned to what a page can show, aligned over runs."""

import numpy as np


def bucket_edges(last_step: float, points: int) -> np.ndarray:
    """Step borders of about `points` buckets: dense at the start (for logarithmic axes), even afterwards."""
    last = max(float(last_step), 1.0)
    early = np.geomspace(1, last, points // 4 + 1)
    edges = np.unique(np.ceil(np.concatenate([early, np.linspace(0, last, points - points // 4 + 1)])))
    return edges[edges > 0]


def thin(stream: dict[str, np.ndarray], edges: np.ndarray) -> dict[str, np.ndarray]:
    """Average each column of a stream over the buckets (edges[k−1], edges[k]]; empty buckets are left out.

    Runs that are thinned with the same edges stay aligned, so that their mean over seeds is a mean at equal steps.
    A bucket that holds a nan stays nan: a diverged loss must not be averaged away.
    """
    step = stream["step"]
    if len(step) == 0:
        return {**stream, "bucket": np.empty(0)}
    bucket = np.minimum(np.searchsorted(edges, step, side="left"), len(edges) - 1)
    starts = np.flatnonzero(np.diff(bucket, prepend=-1))
    counts = np.diff(np.append(starts, len(step)))
    thinned = {name: np.add.reduceat(values, starts) / counts for name, values in stream.items()}
    return {**thinned, "bucket": edges[bucket[starts]]}
