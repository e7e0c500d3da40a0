"""How sure a block is: evidence for every block; κ, κ̃ and robust weights for the blocks that filter."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from polarlm.diagnostics.layer import Layer, line_fit, wide


def precision_values(layer: Layer) -> dict[str, Tensor]:
    """Scalars () and per-head numbers (H,) of one layer, without the leading `precision/`."""
    evidence = layer.log_evidence  # (B, H, T)
    # log P_attn grows with the number of tokens in view; its slope is the γ of i^−γ (App. G.3).
    count = layer.visible.sum(-1).expand(evidence.shape[0], -1).log().to(evidence.dtype)  # (B, T)
    log_count = count.unsqueeze(1).expand_as(evidence)
    slope, _ = line_fit(*(x.transpose(0, 1).flatten(1) for x in (log_count, evidence)))
    values = {
        "log_evidence": evidence.mean((0, 2)),
        "log_evidence_std": evidence.transpose(0, 1).flatten(1).std(-1),
        "log_evidence_slope": slope,
    }
    if evidence.shape[1] > 1:  # what the evidence projection (Prop. 5) can make use of
        values["log_evidence_spread"] = evidence.std(1).mean()
    return values | _robust_values(layer) | _extension_values(layer)


def _extension_values(layer: Layer) -> dict[str, Tensor]:
    """What tokens leave of the past; the gate (G.1) that attention meets on average; precision between layers (G.3)."""
    names = [n for n in ("log_prior_precision", "log_posterior_precision", "fusion_step") if n in layer.record]
    values: dict[str, Tensor] = {name: wide(layer.record[name]).mean((0, 2)) for name in names}
    if "log_forget" in layer.record:
        values["kept_of_the_past"] = wide(layer.record["log_forget"]).exp().mean((0, 2))
    if "gated_weights" in layer.record:
        gated = wide(layer.record["gated_weights"])
        values["gate"] = gated.sum(-1).mean((0, 2))
        values["gate_negative_share"] = torch.where(gated < 0, layer.weights, 0.0).sum(-1).mean((0, 2))
    return values


def log_precisions(layer: Layer) -> dict[str, Tensor]:
    """log κ and log κ̃ (B or 1, H, T, T) of the blocks that have them."""
    return {name: wide(layer.record[name]) for name in ("log_kappa", "log_kappa_tilde") if name in layer.record}


def _robust_values(layer: Layer) -> dict[str, Tensor]:
    if "robust_weight" not in layer.record:
        return {}
    seen = layer.visible.unsqueeze(1)  # (B or 1, 1, T, T)
    weight = torch.where(seen, wide(layer.record["robust_weight"]), 0.0)
    pairs = seen.sum((0, 2, 3)) * (weight.shape[0] // seen.shape[0])
    values = {
        "robust_weight": weight.sum((0, 2, 3)) / pairs,
        "robust_weight_self": weight.diagonal(dim1=-2, dim2=-1).mean((0, 2)),
    }
    bound = _outlier_bound(layer)
    if bound is not None:
        values["outlier_share"] = (seen & (weight < bound)).to(weight.dtype).sum((0, 2, 3)) / pairs
    return values


def _outlier_bound(layer: Layer) -> Tensor | None:
    # A pair is an outlier when its distance exceeds the kernel's own scale: x/ν > 1 (Student-t) or x/τ > 1.
    if "nu_t" in layer.parameters:
        power = layer.record.get("power", layer.parameters["nu_t"] + 1)
        bound = torch.exp(-power * math.log(2.0))
    elif "tau" in layer.parameters:
        bound = torch.full_like(layer.parameters["tau"], math.exp(-1.0))
    else:
        return None
    return bound.reshape(-1, 1, 1)
