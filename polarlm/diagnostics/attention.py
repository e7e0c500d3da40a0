"""Where attention looks: spread, sinks, the token itself, and whether the attended values agree with it."""

from __future__ import annotations

import torch
from torch import Tensor

from polarlm.diagnostics.layer import TINY, Layer, cosine, pearson

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
