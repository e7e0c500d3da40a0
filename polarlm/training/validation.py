"""Loss, perplexity and bits per byte of a model on a split.

Protocol `windows`: the split is cut into non-overlapping windows of the model's context, each token except the very
first is predicted once from the tokens before it in its window. Sums are taken in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from polarlm.model import GPT

IGNORED = -100


@torch.no_grad()
def evaluate(
    model: GPT,
    batches: Iterable[dict[str, Tensor]],
    *,
    bytes_per_token: float,
    device: torch.device,
    precision: AbstractContextManager | None = None,
    reduce: Callable[[Tensor], Tensor] | None = None,
    on_batch: Callable[[], None] | None = None,
) -> dict[str, float]:
    """Evaluate on all batches; `reduce` sums (nats, tokens) over the processes that share the split."""
    training = model.training
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    with precision or nullcontext():
        for batch in batches:
            targets = batch["targets"].to(device)
            documents = batch.get("documents")
            nats = model.loss(
                batch["tokens"].to(device),
                targets,
                documents=None if documents is None else documents.to(device),
                reduction="sum",
            )
            totals += torch.stack([nats.double(), (targets != IGNORED).sum().double()])
            if on_batch:
                on_batch()
    model.train(training)
    nats_total, tokens = (reduce(totals) if reduce else totals).tolist()
    loss = nats_total / tokens if tokens else math.nan
    return {
        "loss": loss,
        "perplexity": math.exp(loss) if loss < 700 else math.inf,
        "bits_per_byte": loss / math.log(2) / bytes_per_token,
        "tokens": int(tokens),
    }
