"""Is magnitude confidence, and evidence too? Their correlation with the loss and entropy of the next token."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from polarlm.diagnostics.layer import TINY, Layer
from polarlm.diagnostics.probe import LayerReader, eval_mode
from polarlm.evaluation.scores import window_batches
from polarlm.evaluation.text import Text
from polarlm.ignored import IGNORED
from polarlm.model import GPT


class _Signals(LayerReader):
    """Keeps log m and log-evidence of every layer, forgets the rest."""

    def __init__(self, model: GPT, documents: Tensor | None) -> None:
        super().__init__(model, documents)
        self.kept: list[tuple[Tensor, Tensor]] = []

    def measure(self, layer: Layer) -> None:
        # (B, T) and, averaged over heads, (B, T)
        self.kept.append((layer.magnitude.clamp_min(TINY).log(), layer.log_evidence.mean(1)))


@torch.no_grad()
def confidence(model: GPT, text: Text, *, mask_documents: bool = False) -> dict[str, Any]:
    """Per layer: Pearson's and Spearman's correlation of log m and of the mean log-evidence with loss and entropy.

    If they are confidence, all of them are below 0: the surer a block, the smaller the loss and the narrower the guess.
    """
    context, device = model.config.context, model.embedding.weight.device
    loss: list[np.ndarray] = []
    entropy: list[np.ndarray] = []
    signals: list[list[tuple[np.ndarray, ...]]] = []
    with eval_mode(model):
        for batch in window_batches(text, context, context, mask_documents=mask_documents):
            documents = None if batch.documents is None else batch.documents.to(device)
            reader = _Signals(model, documents)
            logp = model(batch.tokens.to(device), documents=documents, record=reader).float().log_softmax(-1)
            counted = (batch.targets != IGNORED).to(device)
            targets = batch.targets.to(device)[counted]
            loss.append(-logp[counted].gather(1, targets[:, None])[:, 0].double().cpu().numpy())
            entropy.append(-(logp.exp() * logp).sum(-1)[counted].double().cpu().numpy())
            signals.append([tuple(s[counted].double().cpu().numpy() for s in layer) for layer in reader.kept])
    outcomes = {"loss": np.concatenate(loss), "entropy": np.concatenate(entropy)}
    result: dict[str, Any] = {"targets": len(outcomes["loss"])}
    for index, name in enumerate(("magnitude", "log_evidence")):
        layers = [np.concatenate([batch[layer][index] for batch in signals]) for layer in range(len(signals[0]))]
        for outcome, values in outcomes.items():
            result[f"{name}_{outcome}"] = {
                "pearson": [correlation_or_none(stats.pearsonr, layer, values) for layer in layers],
                "spearman": [correlation_or_none(stats.spearmanr, layer, values) for layer in layers],
            }
    return result


def correlation_or_none(kind: Any, x: np.ndarray, y: np.ndarray) -> float | None:
    """A correlation by scipy's function; None when one side does not vary."""
    return None if np.ptp(x) == 0 or np.ptp(y) == 0 else float(kind(x, y).statistic)
