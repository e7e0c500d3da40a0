"""Losses of every token of a text, read in windows; all protocols use them.

A window holds `context` tokens; the next begins `stride` tokens later and scores only what the one before could not
reach. So every target has at least context − stride tokens before it (at the beginning of the text: all there are).
stride = context are windows that do not overlap; stride = 1 gives every token the longest possible context.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from polarlm.data import Tokenizer, TokenStore
from polarlm.errors import UserError
from polarlm.evaluation.metrics import Tally, TextSize
from polarlm.ignored import IGNORED
from polarlm.model import GPT
from polarlm.model.gpt import document_positions

BATCH_TOKENS = 8192  # read at a time: enough to keep a CPU or a GPU busy, little enough for long contexts


@dataclass(frozen=True)
class WindowBatch:
    """Windows (B, T) with the targets each of them scores (−100 elsewhere) and the targets' places in the text."""

    tokens: Tensor
    targets: Tensor
    documents: Tensor | None
    places: np.ndarray  # (B, T)


def window_spans(length: int, context: int, stride: int) -> list[tuple[int, int, int]]:
    """(begin, first target, end) of every window: it reads tokens [begin, end − 1) and scores [first target, end)."""
    if not 1 <= stride <= context:
        raise UserError(f"stride={stride} must be between 1 and the context ({context})")
    spans, scored, begin = [], 1, 0
    while scored < length:
        end = min(begin + context + 1, length)
        spans.append((begin, scored, end))
        scored, begin = end, begin + stride
    return spans


def window_batches(
    text: Text,
    context: int,
    stride: int,
    *,
    mask_documents: bool = False,
    corrupt: Callable[[np.ndarray], np.ndarray] | None = None,
) -> Iterator[WindowBatch]:
    """All windows of a text in order; `corrupt` changes what is read (tokens of one window), never what is scored."""
    spans = window_spans(len(text.tokens), context, stride)
    rows = max(1, BATCH_TOKENS // context)
    for first in range(0, len(spans), rows):
        group = spans[first : first + rows]
        tokens = np.zeros((len(group), context), np.int64)
        targets = np.full((len(group), context), IGNORED, np.int64)
        documents = np.zeros((len(group), context), np.int64) if mask_documents else None
        places = np.zeros((len(group), context), np.int64)
        for row, (begin, scored, end) in enumerate(group):
            size = end - 1 - begin
            read = text.tokens[begin : end - 1]
            tokens[row, :size] = corrupt(read) if corrupt else read
            places[row, :size] = np.arange(begin + 1, end)
            targets[row, scored - begin - 1 : size] = text.tokens[scored:end]
            if documents is not None:
                ids = text.document_of(np.arange(begin, end))
                documents[row, :size] = ids[:-1]
                targets[row, :size][ids[1:] != ids[:-1]] = IGNORED  # nothing in its own document comes before it
        yield WindowBatch(
            torch.from_numpy(tokens),
            torch.from_numpy(targets),
            None if documents is None else torch.from_numpy(documents),
            places,
        )


Visit = Callable[[Tensor, Tensor], None]  # (log-probabilities (n, V), targets (n,)) of the tokens that count


@dataclass(frozen=True)
class Scores:
    """One entry per scored target, in the order of the text."""

    places: np.ndarray  # index of the target in the text
    targets: np.ndarray  # its id
    seen: np.ndarray  # how many tokens the model had read before it
    nats: np.ndarray  # float64
    entropy: np.ndarray  # of the predicted distribution, nats
    correct: np.ndarray  # bool: more likely than every other token

    def tally(self, text: Text) -> Tally:
        """The counts that the metrics are made of."""
        return Tally(
            nats=float(self.nats.sum()), targets=len(self.nats), correct=int(self.correct.sum()), text=text.size
        )


def score_text(
    model: GPT,
    text: Text,
    *,
    context: int | None = None,
    stride: int | None = None,
    mask_documents: bool = False,
    visit: Visit | None = None,
) -> Scores:
    """Score every token once in windows of `context` (the model's own by default) every `stride` tokens."""
    context = context or model.config.context
    batches = window_batches(text, context, stride or context, mask_documents=mask_documents)
    return score_batches(model, batches, visit=visit)


@torch.no_grad()
def score_batches(model: GPT, batches: Iterable[WindowBatch], *, visit: Visit | None = None) -> Scores:
    """Score the targets of all windows."""
    device, training = model.embedding.weight.device, model.training
    model.eval()
    parts: list[tuple[np.ndarray, ...]] = []
    for batch in batches:
        documents = None if batch.documents is None else batch.documents.to(device)
        hidden = model.hidden(batch.tokens.to(device), documents=documents)
        counted = batch.targets != IGNORED
        rows, columns = (index.numpy() for index in counted.nonzero(as_tuple=True))
        targets = batch.targets[counted].to(device)
        nats, entropy, correct = _judge(model, hidden[counted.to(device)], targets, visit)
        before = columns if batch.documents is None else document_positions(batch.documents).numpy()[rows, columns]
        parts.append((batch.places[rows, columns], targets.cpu().numpy(), before + 1, nats, entropy, correct))
    model.train(training)
    joined = [np.concatenate(part) for part in zip(*parts)]
    order = np.argsort(joined[0], kind="stable")
    return Scores(*(part[order] for part in joined))


def _judge(model: GPT, hidden: Tensor, targets: Tensor, visit: Visit | None) -> tuple[np.ndarray, ...]:
    parts = []
    for rows, logp in model.log_probabilities(hidden):
        target = targets[rows]
        picked = logp.gather(1, target[:, None])[:, 0]
        entropy = -(logp.exp() * logp).sum(-1)
        if visit:
            visit(logp, target)
        others = logp.scatter(1, target[:, None], -torch.inf).amax(-1)
        parts.append((-picked.double(), entropy, picked > others))
    return tuple(torch.cat(part).cpu().numpy() for part in zip(*parts))


# -- the text that is read, and how long it is in every unit ----------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """Tokens (N,) and the places at which a document begins (the first is 0)."""

    tokens: np.ndarray
    starts: np.ndarray
    size: TextSize

    def document_of(self, places: np.ndarray) -> np.ndarray:
        """The number of the document that each place lies in."""
        return np.searchsorted(self.starts, places, side="right") - 1


def read_text(store: TokenStore, tokenizer: Tokenizer, tokens: int | None = None) -> Text:
    """The first `tokens` tokens of a split (all of them by default)."""
    count = min(tokens or len(store), len(store))
    if count < 2:
        raise UserError(f"The {store.split} split gives {count} tokens to judge on; at least 2 are needed.")
    starts = np.union1d([0], store.document_starts(0, count)).astype(np.int64)
    return Text(store[:count].astype(np.int64), starts, text_size(store, tokenizer, count))


_known: dict[tuple[str, int, int], TextSize] = {}  # by content, so that every validation of a run counts only once


def text_size(store: TokenStore, tokenizer: Tokenizer, tokens: int | None = None) -> TextSize:
    """The size of a split's first `tokens` tokens (all of them by default).

    The split's bytes are those of the text that was read. A tokenizer that loses something (unknown words, folded
    case) gives back other bytes than it got: bytes and characters of its decoded text are scaled by that ratio, which
    is 1 for byte, character and byte-level BPE tokenizers.
    """
    total = len(store)
    tokens = min(tokens or total, total)
    size_of_text = _known.get((store.fingerprint, store.bytes, tokens))
    if size_of_text is None:
        decoded = decoded_size(store, tokenizer, total)
        ratio = store.bytes / decoded.bytes if decoded.bytes and decoded.bytes != store.bytes else 1
        part = decoded if tokens == total else decoded_size(store, tokenizer, tokens)
        size = store.bytes if tokens == total else part.bytes * ratio
        size_of_text = TextSize(tokens, size, part.characters * ratio, part.words)
        _known[store.fingerprint, store.bytes, tokens] = size_of_text
    return size_of_text


def decoded_size(store: TokenStore, tokenizer: Tokenizer, tokens: int) -> TextSize:
    """What the first `tokens` tokens decode to, document by document."""
    borders = np.unique(np.concatenate([[0], store.document_starts(0, tokens), [tokens]])).tolist()
    size = characters = words = 0
    for begin, end in itertools.pairwise(borders):
        text = decoded_text(store[begin:end], tokenizer)
        size += len(text.encode())
        characters += len(text)
        words += len(text.split())
    return TextSize(tokens, size, characters, words)


def decoded_text(ids: np.ndarray, tokenizer: Tokenizer) -> str:
    """What ids decode to; end-of-text tokens stand for nothing."""
    return tokenizer.decode((ids if tokenizer.eos_id is None else ids[ids != tokenizer.eos_id]).tolist())
