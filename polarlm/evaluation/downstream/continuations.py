"""How likely a model holds a continuation of a context, and whether it would have written it itself.

The conventions are those of lm-evaluation-harness, so that numbers can be compared: a context is encoded by itself, the
continuation is what the encoding of both adds to it; without a context an end-of-text token stands before it; what is
too long loses its beginning.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from polarlm.data import Tokenizer
from polarlm.model import GPT

BATCH_TOKENS = 8192


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
