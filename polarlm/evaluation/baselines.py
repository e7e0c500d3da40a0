"""The n-gram baselines in the same numbers as the model: what counting alone achieves on a text."""

from __future__ import annotations

from polarlm.data import Corpus
from polarlm.data.baselines import ngram_losses
from polarlm.evaluation.metrics import Tally, measure
from polarlm.evaluation.text_size import text_size


def baseline_metrics(corpus: Corpus, split: str = "val") -> dict[str, dict[str, float]]:
    """Every metric that losses alone allow, for unigram and bigram counts of the training text."""
    size = text_size(corpus.store(split), corpus.tokenizer)
    targets = size.tokens - 1
    return {
        name: measure(Tally(nats=loss * targets, targets=targets, text=size))
        for name, loss in ngram_losses(corpus, split).items()
    }
