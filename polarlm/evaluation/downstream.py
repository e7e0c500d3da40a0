"""Downstream tasks: Minimal pairs of grammar, last words, whole documents.

The conventions are those of lm-evaluation-harness, so that numbers can be compared: a context is encoded by itself, the
continuation is what the encoding of both adds to it; without a context an end-of-text token stands before it; what is
too long loses its beginning. The tasks' examples are read from local copies, never from the network.
"""

from __future__ import annotations

import json
import lzma
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from polarlm.data import Tokenizer
from polarlm.data.atomic import allowed_in_memory, require_allowed
from polarlm.data.hub import local_copy
from polarlm.errors import UserError
from polarlm.evaluation.metrics import Tally, TextSize
from polarlm.evaluation.scores import BATCH_TOKENS, Text
from polarlm.model import GPT


class Likelihood(NamedTuple):
    """ln p(continuation | context), and whether every token of it was the most likely one."""

    nats: float
    greedy: bool


def start_token(tokenizer: Tokenizer) -> int:
    """What stands before the first token of a text: the end of another, or a line end where there is no such token."""
    return tokenizer.eos_id if tokenizer.eos_id is not None else int(tokenizer.encode("\n")[0])


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Ids of context and continuation; spaces at the context's end belong to the continuation."""
    bare = context.rstrip()
    continuation, context = context[len(bare) :] + continuation, bare
    if not context:
        return [start_token(tokenizer)], tokenizer.encode(continuation)
    before = tokenizer.encode(context)
    return before, tokenizer.encode(context + continuation)[len(before) :]


@torch.no_grad()
def likelihoods(model: GPT, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Likelihood]:
    """One answer per (context ids, continuation ids), in the order given; batches hold rows of similar length."""
    model.eval()
    device, longest = model.embedding.weight.device, model.config.context
    rows = [[*context, *continuation][-(longest + 1) :] for context, continuation in pairs]
    results: list[Likelihood] = [Likelihood(0.0, True)] * len(pairs)
    for numbers in _batches([len(row) - 1 for row in rows]):
        width = max(len(rows[n]) - 1 for n in numbers)
        tokens = torch.zeros(len(numbers), width, dtype=torch.long)
        counted = torch.zeros(len(numbers), width, dtype=torch.bool)
        targets = torch.zeros(len(numbers), width, dtype=torch.long)
        for place, n in enumerate(numbers):
            row, size = rows[n], len(rows[n]) - 1
            tokens[place, :size], targets[place, :size] = torch.tensor(row[:-1]), torch.tensor(row[1:])
            counted[place, max(0, size - len(pairs[n][1])) : size] = True
        # Padding stands at the end, where a causal model does not see it.
        hidden = model.hidden(tokens.to(device))[counted.to(device)]
        wanted = targets[counted].to(device)
        nats, hits = [], []
        for part, logp in model.log_probabilities(hidden):
            nats.append(logp.gather(1, wanted[part, None])[:, 0].double())
            hits.append(logp.argmax(-1) == wanted[part])
        sums, all_hits = torch.cat(nats).cpu(), torch.cat(hits).cpu()
        for n, size_nats, size_hits in zip(
            numbers, sums.split(counted.sum(1).tolist()), all_hits.split(counted.sum(1).tolist())
        ):
            results[n] = Likelihood(float(size_nats.sum()), bool(size_hits.all()))
    return results


def rolling_windows(ids: Sequence[int], start: int, context: int) -> Iterator[tuple[list[int], list[int]]]:
    """(what is read first, what is scored) over a long text: windows side by side, the last one reaching back."""
    text = [start, *ids]
    done = 0
    while done < len(ids):
        end = min(done + context, len(ids))
        # The first window reads from the start token on; a later one is always full, so the last overlaps.
        begin = max(0, end - context) if done else 0
        yield text[begin : done + 1], list(ids[done:end])
        done = end


def _batches(lengths: list[int]) -> Iterable[list[int]]:
    """Row numbers, longest rows first, as many together as BATCH_TOKENS allows; empty rows are left out."""
    order = sorted((n for n in range(len(lengths)) if lengths[n] > 0), key=lambda n: -lengths[n])
    while order:
        rows = max(1, BATCH_TOKENS // lengths[order[0]])
        yield order[:rows]
        order = order[rows:]


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


BLIMP_FILE = "blimp_dev.jsonl.xz"


def blimp(model: GPT, tokenizer: Tokenizer, rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Accuracy over all pairs, over the paradigms' means, and of every paradigm."""
    pairs = list(rows)
    sentences = [row[key] for row in pairs for key in ("sentence_good", "sentence_bad")]
    scored = likelihoods(model, [encode_pair(tokenizer, "", sentence) for sentence in sentences])
    right = np.array([good.nats > bad.nats for good, bad in zip(scored[::2], scored[1::2])])
    paradigm = np.array([row["UID"] for row in pairs])
    each = {name: float(right[paradigm == name].mean()) for name in np.unique(paradigm).tolist()}
    return {
        "pairs": len(pairs),
        "accuracy": float(right.mean()),
        "accuracy_of_paradigms": float(np.mean(list(each.values()))),
        "paradigms": {"paradigm": list(each), "accuracy": list(each.values())},
    }


LAMBADA_FILE = "lambada/lambada_dev.jsonl"


def lambada(model: GPT, tokenizer: Tokenizer, rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Accuracy (the model itself would have written the word) and the word's mean log-likelihood and perplexity."""
    passages = [row["text"].rpartition(" ") for row in rows]
    scored = likelihoods(model, [encode_pair(tokenizer, before, f" {word}") for before, _, word in passages])
    nats = -sum(one.nats for one in scored) / len(scored)
    return {
        "passages": len(scored),
        "accuracy": sum(one.greedy for one in scored) / len(scored),
        "target_log_likelihood": -nats,
        "target_perplexity": math.exp(nats) if nats < 700 else math.inf,
    }


def task_file(name: str) -> Path:
    """The local copy of a task's file in data/raw or $POLARLM_SHARED_DATA."""
    copy = local_copy(name)
    if copy is None:
        raise UserError(
            f"{name} is neither in data/raw nor in the folder named by POLARLM_SHARED_DATA; put a copy there"
        )
    return copy


def _unpacked(path: Path) -> bytes:
    allowed = allowed_in_memory(path)
    with lzma.open(path, "rb") as file:
        raw = file.read(allowed + 1)
    require_allowed(path, len(raw), allowed, "Get the file from its source again.")
    return raw


def read_rows(path: Path, limit: int | None = None) -> list[dict[str, Any]]:
    """The objects of a .jsonl file (also .xz), at most `limit` of them, spread evenly over the file."""
    raw = _unpacked(path) if path.suffix == ".xz" else path.read_bytes()
    lines = [line for line in raw.decode().split("\n") if line.strip()]
    if limit is not None and limit < len(lines):
        lines = [lines[number * len(lines) // limit] for number in range(limit)]
    return [json.loads(line) for line in lines]
