"""A model reads a text and its losses and hits are counted: what every metric is made of.

Protocol `windows`: the text is cut into windows of the model's context that do not overlap; each token except the very
first is predicted once, from the tokens before it in its window. Sums over batches are taken in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from polarlm.evaluation.metrics import Tally, TextSize
from polarlm.ignored import IGNORED
from polarlm.model import GPT


@torch.no_grad()
def tally_batches(
    model: GPT,
    batches: Iterable[dict[str, Tensor]],
    text: TextSize,
    *,
    device: torch.device | None = None,
    precision: AbstractContextManager | None = None,
    reduce: Callable[[Tensor], Tensor] | None = None,
    on_batch: Callable[[], None] | None = None,
) -> Tally:
    """Count over all batches of a text of this size; `reduce` sums over the processes that share it."""
    device = device or model.embedding.weight.device
    training = model.training
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64, device=device)
    with precision or nullcontext():
        for batch in batches:
            targets = batch["targets"].to(device)
            documents = batch.get("documents")
            nats, hits = model.tally(
                batch["tokens"].to(device), targets, documents=None if documents is None else documents.to(device)
            )
            totals += torch.stack([nats.double(), (targets != IGNORED).sum().double(), hits.double()])
            if on_batch:
                on_batch()
    model.train(training)
    nats_total, counted, correct = (reduce(totals) if reduce else totals).tolist()
    return Tally(nats=nats_total, targets=int(counted), correct=int(correct), text=text)
