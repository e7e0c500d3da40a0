"""Loss against how much of the text a model had read before the token: does a longer context help?"""

from __future__ import annotations

from typing import Any

import numpy as np

from polarlm.evaluation.scores import Scores


def position_edges(longest: int) -> np.ndarray:
    """Bin edges 1, 2, 3, 4, 6, 8, 12, 16, … up to longest + 1: single positions first, then ever wider bins.

    The last position never stands alone: contexts are powers of two, and a bin of one position is mostly noise.
    """
    steps = {2, 3} | {2**n for n in range(2, 40)} | {3 * 2**n for n in range(1, 40)}
    return np.array([1, *sorted(edge for edge in steps if edge < longest), longest + 1])


def loss_by_position(scores: Scores, longest: int) -> dict[str, Any]:
    """Mean loss of the tokens with so many tokens before them; empty bins are left out."""
    edges = position_edges(longest)
    bins = np.searchsorted(edges, scores.seen, side="right") - 1
    count = np.bincount(bins, minlength=len(edges) - 1)
    nats = np.bincount(bins, scores.nats, minlength=len(edges) - 1)
    kept = count > 0
    return {
        "from": edges[:-1][kept].tolist(),
        "to": (edges[1:] - 1)[kept].tolist(),
        "loss": (nats[kept] / count[kept]).tolist(),
        "targets": count[kept].tolist(),
    }
