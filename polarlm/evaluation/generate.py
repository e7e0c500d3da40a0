"""Text out of a model: sampling with temperature, top-k and top-p, one cached step per token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from polarlm.data import Tokenizer
from polarlm.errors import UserError
from polarlm.model import GPT


def filter_logits(logits: Tensor, temperature: float, top_k: int | None, top_p: float | None) -> Tensor:
    """Logits (V,) with everything outside the top k, or outside the smallest set of mass top_p, set to −∞."""
    logits = logits.float() / temperature
    if top_k is not None and top_k < logits.numel():
        kth = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if top_p is not None and top_p < 1:
        ordered, order = logits.sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        logits = logits.index_fill(0, order[before >= top_p], -torch.inf)  # the most likely token always stays
    return logits


@torch.no_grad()
def sample_tokens(
    model: GPT,
    prompt: list[int],
    count: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop: int | None = None,
) -> Iterator[int]:
    """Yield up to `count` tokens; temperature 0 takes the most likely one. Longer texts slide the window by half."""
    if temperature < 0 or (top_k is not None and top_k < 1) or (top_p is not None and not 0 < top_p <= 1):
        raise UserError(
            f"temperature={temperature}, top_k={top_k}, top_p={top_p}: need temperature ≥ 0, top_k ≥ 1, 0 < top_p ≤ 1"
        )
    if not prompt:
        raise UserError("Generation needs at least one token to start from; give a prompt")
    model.eval()
    device = model.embedding.weight.device
    context = model.config.context
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    new = tokens[-context:]
    cache = model.new_cache(1, context)
    for _ in range(count):
        if cache.length + len(new) > context:
            # The cache is full: start again from the newest half of the text, so that re-reading stays rare.
            new = tokens[-max(1, context // 2) :]
            cache = model.new_cache(1, context)
        logits = model(torch.tensor([new], device=device), cache=cache)[0, -1].cpu()
        if temperature == 0:
            token = int(logits.argmax())
        else:
            kept = filter_logits(logits, temperature, top_k, top_p)
            token = int(torch.multinomial(kept.softmax(-1), 1, generator=generator))
        if token == stop:
            return
        yield token
        tokens.append(token)
        new = [token]


def sample_text(model: GPT, tokenizer: Tokenizer, prompt: str, count: int, **options: Any) -> str:
    """The prompt's continuation as text; an empty prompt starts a new document."""
    start = list(tokenizer.encode(prompt)) if prompt else []
    if not start:
        start = [tokenizer.eos_id] if tokenizer.eos_id is not None else list(tokenizer.encode("\n"))
    return tokenizer.decode(list(sample_tokens(model, start, count, **options)))
