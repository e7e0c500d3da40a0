"""The n-gram baselines in the same numbers as the model: what counting alone achieves on a text."""

from __future__ import annotations

import numpy as np

from polarlm.data import Corpus
from polarlm.evaluation.metrics import Tally, measure
from polarlm.evaluation.text import text_size

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
