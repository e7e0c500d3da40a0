"""What a model says about every token of a text: the raw material of all protocols."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from polarlm.evaluation.metrics import Tally
from polarlm.evaluation.text import Text
from polarlm.evaluation.windows import WindowBatch, window_batches
from polarlm.ignored import IGNORED
from polarlm.model import GPT
from polarlm.model.gpt import document_positions

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
