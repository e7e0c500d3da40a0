"""The probe: run the model once on fixed sequences, eagerly, and say what happened in every layer.

    probe = run_probe(model, tokens)          # tokens (B, T) -> Probe
    probe.values["radial/residual_rms"]       # number | [layer] | [layer][head]
    probe.scalars()                           # {"radial/residual_rms/layer_03": …}

The forward pass is the model's own (its `record` argument), without gradients, in eval mode: nothing is drawn from a
random generator and the training step, compiled or not, never knows. Each layer's record is reduced as soon as the
layer has run, so that only one layer's attention matrices are alive at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polarlm.attention.mixer import Record
from polarlm.diagnostics.layer import TINY, Layer, pearson, read_layer, root_mean_square
from polarlm.diagnostics.measures import (
    attention_values,
    by_lag,
    log_precisions,
    precision_values,
    probe_lags,
    radial_values,
    stream_values,
)
from polarlm.evaluation.scores import Text, window_batches
from polarlm.ignored import IGNORED
from polarlm.model import GPT

Number = float | None  # None where a quantity is undefined (NaN), as JSON writes it
BINS = 32


@dataclass(frozen=True)
class Histogram:
    """Counts between edges of one quantity over the tokens (and heads) of one layer."""

    counts: list[int]
    edges: list[float]


@dataclass(frozen=True)
class Probe:
    """Everything one probe found; names are slash paths without the layer."""

    layers: int
    heads: int
    values: dict[str, Any]  # number, [layer] or [layer][head]; residual sizes have layers + 1 entries
    profiles: dict[str, dict[str, Any]]  # {"x": lags, "y": [layer][head][lag], "xlabel": …}
    histograms: dict[str, list[Histogram]] = field(default_factory=dict)  # [layer]

    def scalars(self) -> dict[str, Number]:
        """Flat names: radial/growth/layer_03, precision/log_evidence/layer_03/head_1."""
        return dict(_flatten(self.values))

    def row(self, step: int, tokens: int) -> dict[str, Any]:
        """The line of diagnostics/probe.jsonl."""
        head = {"step": step, "tokens": tokens, "layers": self.layers, "heads": self.heads}
        histograms = {name: [asdict(layer) for layer in layers] for name, layers in self.histograms.items()}
        return {**head, "values": self.values, "profiles": self.profiles, "histograms": histograms}


@torch.no_grad()
def run_probe(model: GPT, tokens: Tensor, documents: Tensor | None = None) -> Probe:
    """Probe a model on tokens (B, T)."""
    reader = _Reader(model, documents)
    with eval_mode(model):
        logits = model(tokens, documents=documents, record=reader)
    return reader.probe(_next_token_loss(logits, tokens, documents))


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode inside, every module's own mode again afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


class LayerReader(list):
    """The list handed to the model as `record`: each layer's record is measured on arrival and then forgotten."""

    def __init__(self, model: GPT, documents: Tensor | None) -> None:
        super().__init__()
        self.mixers = iter([block.mixer for block in model.blocks])
        self.documents = documents

    def append(self, record: Record) -> None:
        rotates = bool(getattr(next(self.mixers), "rotate_values", False))
        with torch.autocast(record["v_bar"].device.type, enabled=False):  # mixed precision is the model's, not ours
            self.measure(read_layer(record, rotates_values=rotates, documents=self.documents))

    def measure(self, layer: Layer) -> None:
        """Keep what is wanted of a layer."""
        raise NotImplementedError


class _Reader(LayerReader):
    def __init__(self, model: GPT, documents: Tensor | None) -> None:
        super().__init__(model, documents)
        self.values: list[dict[str, Tensor]] = []
        self.streams: list[dict[str, Tensor]] = []
        self.profiles: list[dict[str, Tensor]] = []
        self.samples: list[dict[str, Tensor]] = []
        self.lags: list[int] = []

    def measure(self, layer: Layer) -> None:
        self.lags = self.lags or probe_lags(layer.weights.shape[-1])
        self.values.append(_layer_values(layer))
        self.profiles.append(_layer_profiles(layer, self.lags))
        self.streams.append(stream_values(layer.before))
        self.samples.append(
            {
                "radial/magnitude": layer.magnitude,
                "radial/residual_rms": root_mean_square(layer.after),
                "precision/log_evidence": layer.log_evidence,
            }
        )
        self.last = layer.after
        self.heads = layer.weights.shape[1]

    def probe(self, loss: Tensor) -> Probe:
        for values, samples in zip(self.values, self.samples):
            # The paper reads magnitude as confidence: then a large m goes with a small loss.
            counted = ~torch.isnan(loss)
            log_m = samples["radial/magnitude"].clamp_min(1e-12).log()
            values["radial/magnitude_loss_correlation"] = pearson(log_m[counted], loss[counted])
        streams = [*self.streams, stream_values(self.last)]
        values = {f"radial/{name}": numbers for name, numbers in _stack(streams).items()} | _stack(self.values)
        profiles = {name: {"x": self.lags, "y": y, "xlabel": "lag"} for name, y in _stack(self.profiles).items()}
        histograms = {name: [_histogram(layer[name]) for layer in self.samples] for name in self.samples[0]}
        return Probe(len(self.values), self.heads, values, profiles, histograms)


def _layer_values(layer: Layer) -> dict[str, Tensor]:
    groups = {
        "radial": radial_values(layer),
        "precision": precision_values(layer),
        "attention": attention_values(layer),
        "parameters": layer.parameters,
    }
    return {f"{group}/{name}": value for group, values in groups.items() for name, value in values.items()}


def _layer_profiles(layer: Layer, lags: list[int]) -> dict[str, Tensor]:
    profiles = {"attention/weight": by_lag(layer.weights, layer.visible, lags)}
    for name, value in log_precisions(layer).items():
        profiles[f"precision/{name}"] = by_lag(value, layer.visible, lags)
    return profiles


def _next_token_loss(logits: Tensor, tokens: Tensor, documents: Tensor | None) -> Tensor:
    # (B, T) nats; NaN where there is no next token to predict in the same document.
    loss = torch.full(tokens.shape, torch.nan, device=tokens.device)
    nats = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    loss[:, :-1] = nats.view(tokens.shape[0], -1)
    if documents is not None:
        loss[:, :-1][documents[:, 1:] != documents[:, :-1]] = torch.nan
    return loss


def _stack(layers: list[dict[str, Tensor]]) -> dict[str, Any]:
    # {name: [layer][…]}; a layer that lacks what another has (XSA on some layers only) is None there.
    samples = {name: value for layer in reversed(layers) for name, value in layer.items()}
    stacked = {}
    for name, sample in samples.items():
        nothing = torch.full_like(sample, torch.nan)
        stacked[name] = _finite(torch.stack([layer.get(name, nothing) for layer in layers]).tolist())
    return stacked


def _finite(tree: Any) -> Any:
    if isinstance(tree, list):
        return [_finite(item) for item in tree]
    return float(f"{tree:.7g}") if math.isfinite(tree) else None  # fp32 holds no more digits


def _histogram(sample: Tensor) -> Histogram:
    counts, edges = torch.histogram(sample.flatten().float().cpu(), bins=BINS)
    return Histogram([int(n) for n in counts.tolist()], [float(f"{edge:.7g}") for edge in edges.tolist()])


def _flatten(values: dict[str, Any]) -> Iterator[tuple[str, Number]]:
    for name, value in values.items():
        if not isinstance(value, list):
            yield name, value
            continue
        for layer, entry in enumerate(value):
            if not isinstance(entry, list):
                yield f"{name}/layer_{layer:02d}", entry
                continue
            for head, number in enumerate(entry):
                yield f"{name}/layer_{layer:02d}/head_{head}", number


# -- is magnitude confidence, and evidence too? Their correlation with loss and entropy -------------------------------


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
    from scipy import stats  # takes a second, and training probes without it

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
