"""A text document by document, each after an end of text: how lm-evaluation-harness measures WikiText."""

from __future__ import annotations

from polarlm.data import Tokenizer
from polarlm.evaluation.downstream.continuations import likelihoods, rolling_windows, start_token
from polarlm.evaluation.metrics import Tally, TextSize
from polarlm.evaluation.text import Text
from polarlm.model import GPT


def roll_documents(model: GPT, text: Text, tokenizer: Tokenizer) -> Tally:
    """Every token of every document is scored, the first one after an end of text; end-of-text tokens are not."""
    start, context = start_token(tokenizer), model.config.context
    windows = []
    targets = 0
    for begin, end in zip(text.starts, [*text.starts[1:], len(text.tokens)]):
        ids = [int(token) for token in text.tokens[begin:end] if token != tokenizer.eos_id]
        targets += len(ids)
        windows += list(rolling_windows(ids, start, context))
    nats = -sum(one.nats for one in likelihoods(model, windows))
    size = TextSize(targets, text.size.bytes, text.size.characters, text.size.words)
    return Tally(nats=nats, targets=targets, text=size)
