"""Where a loss comes from: position, frequency, document; how well probabilities are calibrated; n-gram baselines."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from polarlm.data import Corpus, Tokenizer
from polarlm.evaluation.metrics import Tally, measure
from polarlm.evaluation.scores import Scores, Text, decoded_text, score_text, text_size
from polarlm.model import GPT


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


def loss_by_frequency(scores: Scores, counts: np.ndarray) -> dict[str, Any]:
    """Mean loss per decade of the target's count in the training text (never, 1–9, 10–99, …); empty ones left out."""
    seen = counts[scores.targets]
    decade = np.where(seen > 0, np.floor(np.log10(np.maximum(seen, 1))).astype(int) + 1, 0)
    columns: dict[str, Any] = {"from": [], "to": [], "loss": [], "accuracy": [], "targets": []}
    for number in np.unique(decade).tolist():
        inside = decade == number
        columns["from"].append(10 ** (number - 1) if number else 0)
        columns["to"].append(10**number - 1 if number else 0)
        columns["loss"].append(float(scores.nats[inside].mean()))
        columns["accuracy"].append(float(scores.correct[inside].mean()))
        columns["targets"].append(int(inside.sum()))
    return columns


def losses_of_documents(scores: Scores, text: Text, tokenizer: Tokenizer) -> dict[str, np.ndarray]:
    """Per document: summed nats, scored targets, hits, tokens, bytes; compact enough to be kept for every run."""
    documents = len(text.starts)
    number = text.document_of(scores.places)
    ends = np.append(text.starts[1:], len(text.tokens))
    documents_text = (decoded_text(text.tokens[begin:end], tokenizer) for begin, end in zip(text.starts, ends))
    return {
        "nats": np.bincount(number, scores.nats, minlength=documents),
        "targets": np.bincount(number, minlength=documents).astype(np.int32),
        "correct": np.bincount(number, scores.correct, minlength=documents).astype(np.int32),
        "tokens": (ends - text.starts).astype(np.int32),
        "bytes": np.array([len(one.encode()) for one in documents_text], np.int32),
    }


# -- does 30 % mean 30 %? Reliability of the most likely token and of the whole distribution --------------------------


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


# -- what counting alone achieves on a text, in the same numbers as the model -----------------------------------------


_LIMIT = 50_000_000  # of training tokens counted; more no longer changes either number noticeably


def baseline_metrics(corpus: Corpus, split: str = "val") -> dict[str, dict[str, float]]:
    """Every metric that losses alone allow, for unigram and bigram counts of the training text."""
    size = text_size(corpus.store(split), corpus.tokenizer)
    targets = size.tokens - 1
    return {
        name: measure(Tally(nats=loss * targets, targets=targets, text=size))
        for name, loss in ngram_losses(corpus, split).items()
    }


def ngram_losses(corpus: Corpus, split: str = "val", tokens: int | None = None) -> dict[str, float]:
    """Nats per target on a split (every token but the first, or its first `tokens`), counted on the train split.

    Unigram: p(w) = (c(w) + 1) / (N + V). Bigram, interpolated after Witten and Bell:
    p(w|v) = (c(v,w) + t(v)·p(w)) / (c(v) + t(v)), t(v) = number of different tokens seen after v.
    """
    vocab = corpus.tokenizer.vocab_size
    seen, seen_after = _pairs(corpus, "train", _LIMIT)
    before, after = _pairs(corpus, split, min(tokens or _LIMIT, _LIMIT))

    answers = seen_after if corpus.probe is not None else np.concatenate([seen[:1], seen_after])
    unigram = (np.bincount(answers, minlength=vocab) + 1.0) / (len(answers) + vocab)
    pairs, counts = np.unique(seen * vocab + seen_after, return_counts=True)
    followers = np.bincount(pairs // vocab, minlength=vocab)
    total = np.bincount(seen, minlength=vocab)

    wanted = before * vocab + after
    place = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
    together = np.where(pairs[place] == wanted, counts[place], 0)
    # A token never seen in training has no followers: then the unigram alone speaks.
    weight = np.maximum(followers[before], 1)
    bigram = (together + weight * unigram[after]) / (total[before] + weight)
    return {"unigram": float(-np.log(unigram[after]).mean()), "bigram": float(-np.log(bigram).mean())}


def _pairs(corpus: Corpus, split: str, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, their targets): the next tokens, or the answers of a task where it asks for one."""
    tokens = corpus.store(split)[:limit].astype(np.int64)
    if corpus.probe is None:
        return tokens[:-1], tokens[1:]
    symbols = tokens[: len(tokens) // corpus.probe.length * corpus.probe.length].reshape(-1, corpus.probe.length)
    answers, asked = corpus.probe.answers(symbols)
    return symbols[asked], answers[asked]
