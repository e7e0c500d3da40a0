import math
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest

from polarlm.data import Corpus
from polarlm.evaluation.breakdowns import ngram_losses


def test_losses_equal_counting_by_hand(corpus_of: Callable[..., Corpus]) -> None:
    corpus = corpus_of("char", 60, append_eos=False)
    train, val = corpus.store("train")[:].tolist(), corpus.store("val")[:].tolist()
    vocab, single = corpus.tokenizer.vocab_size, Counter(train)
    pairs, before = Counter(pairwise(train)), Counter(train[:-1])
    followers = Counter(first for first, _ in pairs)
    unigram = {w: (single[w] + 1) / (len(train) + vocab) for w in range(vocab)}
    expected = {"unigram": 0.0, "bigram": 0.0}
    for v, w in pairwise(val):
        kinds = max(followers[v], 1)
        expected["unigram"] -= math.log(unigram[w]) / (len(val) - 1)
        expected["bigram"] -= math.log((pairs[v, w] + kinds * unigram[w]) / (before[v] + kinds)) / (len(val) - 1)
    assert ngram_losses(corpus) == pytest.approx(expected)


def test_the_bigram_is_a_distribution(corpus_of: Callable[..., Corpus]) -> None:
    losses = ngram_losses(corpus_of("bpe"))
    assert 0 < losses["bigram"] < losses["unigram"] < math.log(300)
