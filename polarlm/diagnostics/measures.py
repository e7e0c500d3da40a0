"""What is measured in a layer: radial growth (App. E), the precision of its evidence, where its attention looks.

All growths are in RMS units, ‖·‖/√dim. The paper's claim is that attention without projection grows the latent state
by α⟨v, v̄⟩/r² to first order, and that the tangent projection removes this; both are measured here, not assumed.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from polarlm.attention.mixer import merge_heads
from polarlm.diagnostics.layer import (
    MIN_STEP,
    TINY,
    Layer,
    angle,
    cosine,
    line_fit,
    pearson,
    root_mean_square,
    tangency,
    wide,
)


def radial_values(layer: Layer) -> dict[str, Tensor]:
    """Scalars () and per-head numbers (H,) of one layer, without the leading `radial/`."""
    before, middle, after = (root_mean_square(z) for z in (layer.before, layer.middle, layer.after))  # (B, T)
    m, state, tangent = layer.magnitude, layer.state, merge_heads(layer.update)
    update = tangent
    if "delta_m" in layer.record:
        delta_m = wide(layer.record["delta_m"])
        update = tangent + (layer.parameters["beta"] * delta_m).unsqueeze(-1) * layer.direction
    estimate = merge_heads(layer.alpha * layer.estimate)

    predicted = (layer.direction * estimate).mean(-1)  # α⟨V, v̄⟩/r² with r² = D
    latent = root_mean_square(state + update) - m
    stream = middle - before
    step = angle(state, state + update)
    values = {
        "growth": (after - before).mean(),
        "growth_attention": stream.mean(),
        "growth_ffn": (after - middle).mean(),
        "growth_predicted": predicted.mean(),
        "growth_latent": latent.mean(),
        "growth_latent_unprojected": (root_mean_square(state + estimate) - m).mean(),
        "magnitude": m.mean(),
        "magnitude_std": m.std(),
        "magnitude_max": m.max(),
        "tangency_latent": tangency(state, tangent).nanmean(),
        "tangency_attention": tangency(layer.before, layer.middle - layer.before).nanmean(),
        "tangency_ffn": tangency(layer.middle, layer.after - layer.middle).nanmean(),
        "angular_step_latent": step.mean(),
        "angular_step_attention": angle(layer.before, layer.middle).mean(),
        "angular_step_ffn": angle(layer.middle, layer.after).mean(),
        "resultant_length": _resultant_length(layer).mean((0, 2)),
        "spectral_mass": (layer.values.square().sum(-1) / layer.values.square().sum((1, 3)).unsqueeze(1)).mean((0, 2)),
    }
    values["growth_slope"], values["growth_r2"] = line_fit(predicted.flatten(), stream.flatten())
    values["growth_latent_slope"], values["growth_latent_r2"] = line_fit(predicted.flatten(), latent.flatten())
    # The paper's resistance: a state of large magnitude turns less, angle ∝ 1/m, slope −1 on log-log axes.
    turned = step > MIN_STEP
    values["resistance_slope"], values["resistance_r2"] = line_fit(m[turned].clamp_min(TINY).log(), step[turned].log())
    if "delta_m" in layer.record:
        values["delta_m"] = delta_m.mean()
        values["delta_m_relative"] = (delta_m / m.clamp_min(TINY)).mean()
        values["delta_m_negative"] = (delta_m < -MIN_STEP * m).to(m.dtype).mean()  # a first token's Δm is rounding
    return values


def stream_values(z: Tensor) -> dict[str, Tensor]:
    """Size of the residual stream (B, T, d) at one depth."""
    rms = root_mean_square(wide(z))
    return {
        "residual_rms": rms.mean(),
        "residual_rms_std": rms.std(),
        "residual_rms_p99": torch.quantile(rms.flatten(), 0.99),
        "residual_rms_first": rms[:, 0].mean(),
    }


def _resultant_length(layer: Layer) -> Tensor:
    # ‖Σ A v‖ / Σ A‖v‖ (B, H, T): 1 iff all attended directions agree; ‖v̄‖/r when every value has radius r.
    attended = (layer.weights @ layer.values.norm(dim=-1, keepdim=True)).squeeze(-1)
    return layer.estimate.norm(dim=-1) / attended.clamp_min(TINY)


# -- how sure a block is: evidence for every block; κ, κ̃ and robust weights for those that filter --------------------


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


# -- where attention looks, and whether the attended values agree with the token --------------------------------------


CONSENSUS_BOUND = 0.5  # above this the first-order theory (local consensus) does not describe a token
SAME = 1e-5  # magnitudes this close are equal but for rounding: a repeated token has the same one in the first layer


def attention_values(layer: Layer) -> dict[str, Tensor]:
    """Per-head numbers (H,) of one layer, without the leading `attention/`; means over all queries."""
    a = layer.weights
    tokens = a.shape[-1]
    shares = a / a.sum(-1, keepdim=True).clamp_min(TINY)  # of blocks whose weights do not sum to 1
    entropy = -torch.special.xlogy(shares, shares).sum(-1)  # nats
    index = torch.arange(tokens, device=a.device)
    seen = layer.visible.expand(a.shape[0], -1, -1)  # (B, T, T)
    first = seen.to(a.dtype).argmax(-1)  # first visible token: 0, or the start of the document
    in_view = layer.magnitude[:, None, :].masked_fill(~seen, -torch.inf)  # (B, T, T)
    largest = in_view >= in_view.amax(-1, keepdim=True) * (1 - SAME)
    lag = (index[:, None] - index).clamp_min(0).to(a.dtype)
    epsilon = _consensus(layer)

    values = {
        "entropy": entropy,
        "effective_tokens": entropy.exp(),
        "mass_first": a.gather(-1, first[:, None, :, None].expand(-1, a.shape[1], -1, 1)).squeeze(-1),
        "mass_self": a.diagonal(dim1=-2, dim2=-1),
        "mass_largest": (a * largest.unsqueeze(1)).sum(-1),
        "mean_lag": (a * lag).sum(-1),
        "self_similarity": cosine(layer.estimate, layer.values),
        "consensus_epsilon": epsilon,
        "consensus_broken": (epsilon > CONSENSUS_BOUND).to(a.dtype),
    }
    values = {name: value.nanmean((0, 2)) for name, value in values.items()}
    estimate = layer.alpha * layer.estimate
    removed = estimate - layer.update
    if bool(removed.any()):  # a block without projection hands on v̄ itself: nothing to report
        # Squared size removed over squared size found; evidence projection starts from v̄ − v and can exceed 1.
        values["removed_share"] = removed.square().sum((0, 2, 3)) / estimate.square().sum((0, 2, 3)).clamp_min(TINY)
    # Does magnitude attract attention? Attention received per query that could see the token, against log m.
    received = a.sum(-2) / seen.sum(-2).unsqueeze(1)
    log_m = layer.magnitude.clamp_min(TINY).log().unsqueeze(1).expand_as(received)
    flat = [x.transpose(0, 1).flatten(1) for x in (log_m, received)]  # (H, B·T)
    values["magnitude_correlation"] = pearson(*flat)
    return values


def probe_lags(tokens: int) -> list[int]:
    """Lags 0, 1, 2, 3, 4, 6, 8, 12, 16, … up to three quarters of a sequence: dense near, sparse far.

    Beyond that the only keys are the first tokens, whose magnitudes are not those of a text.
    """
    lags = {0, 1} | {2**n for n in range(1, 30)} | {3 * 2**n for n in range(29)}
    return sorted(lag for lag in lags if lag <= 3 * tokens // 4)


def by_lag(pairs: Tensor, visible: Tensor, lags: list[int]) -> Tensor:
    """Mean over queries and sequences of a quantity (B, H, T, T) at each lag -> (H, len(lags))."""
    means = []
    for lag in lags:
        along, seen = pairs.diagonal(-lag, -2, -1), visible.diagonal(-lag, -2, -1).unsqueeze(1)  # (B, H, T - lag)
        seen = seen.expand(along.shape[0], 1, -1)
        means.append(torch.where(seen, along, 0.0).sum((0, 2)) / seen.sum((0, 2)))
    return torch.stack(means, dim=-1)


def _consensus(layer: Layer) -> Tensor:
    # ε_i = Σ_j A_ij ‖u_i − û_ij‖ (B, H, T), unit directions per head: ‖u − û‖² = 2 − 2 cos.
    unit = layer.transported()
    # In fp32 the root would turn a rounded cos = 1 (a token and itself, or its twin) into a distance of 5e-4.
    unit = unit if unit.device.type == "mps" else unit.double()
    unit = unit / unit.norm(dim=-1, keepdim=True).clamp_min(TINY)
    cos = unit @ unit.transpose(-1, -2)
    distance = cos.mul_(-2).add_(2).clamp_min_(0).sqrt_().to(layer.weights.dtype)
    return (layer.weights * distance).sum(-1)
