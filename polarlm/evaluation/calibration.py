"""Does 30 % mean 30 %? Reliability of the most likely token, and of the whole predicted distribution."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polarlm.evaluation.scores import score_text
from polarlm.evaluation.text import Text
from polarlm.model import GPT

TOP_BINS = 15  # of equal width, as calibration errors are usually counted
# The whole distribution is mostly tiny probabilities: four bins per decade from 1e-8 to 1.
FULL_EDGES = 10.0 ** (torch.arange(-32, 1, dtype=torch.float64) / 4)


class Reliability:
    """Counts, summed probability and hits of predictions, by probability."""

    def __init__(self, edges: Tensor) -> None:
        self.edges = edges  # inner edges: len + 1 bins
        self.count, self.probability, self.hits = torch.zeros(3, len(edges) + 1, dtype=torch.float64)

    def add(self, probability: Tensor, hit: Tensor) -> None:
        """Add predictions of any shape."""
        p, h = probability.flatten().double().cpu(), hit.flatten().double().cpu()
        bins = torch.bucketize(p, self.edges)
        self.count += torch.bincount(bins, minlength=len(self.count))
        self.probability += torch.bincount(bins, p, minlength=len(self.count))
        self.hits += torch.bincount(bins, h, minlength=len(self.count))

    def gap(self) -> float:
        """Σ over bins of |hits − summed probability|."""
        return float((self.hits - self.probability).abs().sum())

    def curve(self) -> dict[str, list[float]]:
        """Mean probability, frequency and number of predictions of every bin that has any."""
        kept = self.count > 0
        count = self.count[kept]
        return {
            "probability": (self.probability[kept] / count).tolist(),
            "frequency": (self.hits[kept] / count).tolist(),
            "predictions": count.tolist(),
        }


def calibration(model: GPT, text: Text, *, mask_documents: bool = False) -> dict[str, Any]:
    """Expected calibration error of the most likely token, of the full distribution, and both reliability curves.

    `ece` = Σ_bins |hits − Σp| / targets over the most likely tokens; `full_ece` is the same sum over the probabilities
    of all tokens of the vocabulary, still per target, so that 0 is perfect and 2 is the worst there can be.
    """
    top = Reliability(torch.arange(1, TOP_BINS, dtype=torch.float64) / TOP_BINS)
    full = Reliability(FULL_EDGES)

    def visit(logp: Tensor, targets: Tensor) -> None:
        p = logp.exp()
        best = p.max(-1)
        top.add(best.values, best.indices == targets)
        full.add(p, torch.nn.functional.one_hot(targets, p.shape[1]))

    scores = score_text(model, text, mask_documents=mask_documents, visit=visit)
    targets = len(scores.nats)
    return {
        "ece": top.gap() / targets,
        "full_ece": full.gap() / targets,
        "confidence": float(top.probability.sum()) / targets,
        "accuracy_of_most_likely": float(top.hits.sum()) / targets,
        "entropy": float(scores.entropy.mean()),
        "loss": float(scores.nats.mean()),
        "reliability": top.curve(),
        "reliability_full": full.curve(),
    }
