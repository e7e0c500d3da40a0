"""Text generation: sampling with the usual options, one cached step per token, as a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polarlm.data import Tokenizer
from polarlm.data.probes import ProbeTask
from polarlm.errors import UserError
from polarlm.model import GPT


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn; the default draws from the model's own distribution."""

    temperature: float = 1.0  # 0 takes the most likely token
    top_k: int | None = None  # only the k most likely
    top_p: float | None = None  # only the smallest set with this probability
    min_p: float | None = None  # only tokens with this share of the most likely one's probability
    repetition_penalty: float = 1.0  # > 1 makes tokens that stand in the text already less likely
    seed: int = 0

    def __post_init__(self) -> None:
        checks = {
            "temperature": self.temperature == 0 or self.temperature >= 1e-3,
            "top_k": self.top_k is None or self.top_k >= 1,
            "top_p": self.top_p is None or 0 < self.top_p <= 1,
            "min_p": self.min_p is None or 0 <= self.min_p <= 1,
            "repetition_penalty": 0.01 <= self.repetition_penalty <= 100,
            "seed": -(2**63) <= self.seed < 2**63,
        }
        allowed = (
            "temperature 0 or ≥ 0.001, top_k ≥ 1, 0 < top_p ≤ 1, 0 ≤ min_p ≤ 1, 0.01 ≤ repetition_penalty ≤ 100, "
            "|seed| < 2^63"
        )
        for name, right in checks.items():
            if not right:
                raise UserError(f"{name}={getattr(self, name)} is not possible; allowed are {allowed}")


def filter_logits(logits: Tensor, sampling: Sampling, before: Sequence[int] = ()) -> Tensor:
    """Logits (V,) after penalty and temperature, with everything outside top-k, top-p and min-p set to −∞.

    In this order, each on what the one before has left; the most likely token always stays.
    """
    logits = logits.float()
    if sampling.repetition_penalty != 1 and len(before):
        seen = torch.tensor(sorted(set(before)))
        score = logits[seen]
        # Towards "less likely" on both sides of 0 (Keskar et al. 2019).
        penalty = sampling.repetition_penalty
        logits = logits.index_copy(0, seen, torch.where(score > 0, score / penalty, score * penalty))
    logits = logits / (sampling.temperature or 1.0)
    if sampling.top_k is not None and sampling.top_k < logits.numel():
        kth = logits.topk(sampling.top_k).values[-1]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if sampling.top_p is not None and sampling.top_p < 1:
        ordered, order = logits.sort(descending=True)
        mass_before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        logits = logits.index_fill(0, order[1:][mass_before[1:] >= sampling.top_p], -torch.inf)
    if sampling.min_p:
        p = logits.softmax(-1)
        logits = logits.masked_fill(p < sampling.min_p * p.max(), -torch.inf)
    return logits


@torch.no_grad()
def sample_tokens(
    model: GPT, prompt: Sequence[int], count: int, sampling: Sampling | None = None, *, stop: int | None = None
) -> Iterator[int]:
    """Yield up to `count` tokens, ending before the token `stop`. Longer texts slide the window by half."""
    sampling = sampling or Sampling()
    if not prompt:
        raise UserError("Generation needs at least one token to start from; give a prompt")
    model.eval()
    device, context = model.embedding.weight.device, model.config.context
    generator = torch.Generator().manual_seed(sampling.seed)
    tokens = list(prompt)
    new = tokens[-context:]
    cache = model.new_cache(1, context)
    for _ in range(count):
        if cache.length + len(new) > context:
            # The cache is full: start again from the newest half of the text, so that re-reading stays rare.
            new = tokens[-max(1, context // 2) :]
            cache = model.new_cache(1, context)
        logits = filter_logits(model(torch.tensor([new], device=device), cache=cache)[0, -1].cpu(), sampling, tokens)
        if sampling.temperature == 0:
            token = int(logits.argmax())
        else:
            token = int(torch.multinomial(logits.softmax(-1), 1, generator=generator))
        if token == stop:
            return
        yield token
        tokens.append(token)
        new = [token]


def stream_text(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str,
    count: int,
    sampling: Sampling | None = None,
    *,
    stop: Sequence[str] = (),
) -> Iterator[str]:
    """The prompt's continuation in pieces, as soon as they are certain: ends at a stop string or an end of text.

    A piece is held back while it may still change: half of a character, or the beginning of a stop string. An empty
    prompt starts a new document.
    """
    start = list(tokenizer.encode(prompt)) if prompt else []
    if not start:
        start = [tokenizer.eos_id] if tokenizer.eos_id is not None else list(tokenizer.encode("\n"))
    written: list[int] = []
    shown = 0
    for token in sample_tokens(model, start, count, sampling, stop=tokenizer.eos_id):
        written.append(token)
        text = tokenizer.decode(written)
        end = min((place for word in stop if (place := text.find(word)) >= 0), default=None)
        if end is not None:
            yield text[shown:end]
            return
        certain = len(text) - max((_overlap(text, word) for word in stop), default=0)
        if text.endswith("\ufffd"):  # bytes of a character that is not complete yet
            certain = min(certain, len(text.rstrip("\ufffd")))
        if certain > shown:
            yield text[shown:certain]
            shown = certain
    if written:
        yield tokenizer.decode(written)[shown:]


def _overlap(text: str, word: str) -> int:
    """How many characters at the end of the text may be the beginning of the word."""
    return next((n for n in range(min(len(word) - 1, len(text)), 0, -1) if text.endswith(word[:n])), 0)


@torch.no_grad()
def answered_example(model: GPT, task: ProbeTask) -> str:
    """An example of a task that was not trained on, with the model's answer wherever one is asked for.

    `k3→v9` is right, `k3→v7(v9)` would have been v9. What a task's model says elsewhere has no meaning.
    """
    model.eval()
    tokens = next(examples for examples in task.split("val") if len(examples))[:1]
    right, asked = task.answers(tokens)
    words = task.words
    logits = model(torch.from_numpy(tokens).to(model.embedding.weight.device))[..., : len(words)]
    given = logits.argmax(-1).cpu().numpy()
    symbols = []
    for symbol, wanted, answer, counts in zip(tokens[0], right[0], given[0], asked[0], strict=True):
        correction = "" if answer == wanted else f"({words[wanted]})"
        symbols.append(f"{words[symbol]}→{words[answer]}{correction}" if counts else words[symbol])
    return " ".join(symbols)
