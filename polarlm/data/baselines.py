"""What counting alone achieves: unigram and bigram losses, the floor a language model must clearly beat."""

from __future__ import annotations

import numpy as np

from polarlm.data.corpus import Corpus

_LIMIT = 50_000_000  # of training tokens counted; more no longer changes either number noticeably


def ngram_losses(corpus: Corpus, split: str = "val", tokens: int | None = None) -> dict[str, float]:
    """Nats per token on a split (every token but the first, or its first `tokens`), counted on the train split.

    Unigram: p(w) = (c(w) + 1) / (N + V). Bigram, interpolated after Witten and Bell:
    p(w|v) = (c(v,w) + t(v)·p(w)) / (c(v) + t(v)), t(v) = number of different tokens seen after v.
    """
    vocab = corpus.tokenizer.vocab_size
    train = corpus.store("train")[:_LIMIT].astype(np.int64)
    judged = corpus.store(split)[: min(tokens or _LIMIT, _LIMIT)].astype(np.int64)
    before, after = judged[:-1], judged[1:]

    unigram = (np.bincount(train, minlength=vocab) + 1.0) / (len(train) + vocab)
    pairs, counts = np.unique(train[:-1] * vocab + train[1:], return_counts=True)
    followers = np.bincount(pairs // vocab, minlength=vocab)
    total = np.bincount(train[:-1], minlength=vocab)

    wanted = before * vocab + after
    place = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
    together = np.where(pairs[place] == wanted, counts[place], 0)
    # A token never seen in training has no followers: then the unigram alone speaks.
    weight = np.maximum(followers[before], 1)
    bigram = (together + weight * unigram[after]) / (total[before] + weight)
    return {"unigram": float(-np.log(unigram[after]).mean()), "bigram": float(-np.log(bigram).mean())}
