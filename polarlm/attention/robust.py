"""What the filtering blocks (RFA, Polar) share around `robust_attention`: the record and the cost."""

from __future__ import annotations

import torch
from torch import Tensor

from polarlm.attention.kernels import AttentionOutput, DirectionalNoise
from polarlm.attention.mixer import Record, mean_visible
from polarlm.geometry.precision import log_kappa, log_kappa_tilde

# Element-wise work per query-key pair and head: two precisions, the residual, the kernel and its logarithm.
LOGIT_FLOPS = 16


def record_estimate(record: Record, output: AttentionOutput, noise: DirectionalNoise, magnitude: Tensor | None) -> None:
    """Add weights, evidence, precisions (B or 1, H, T, S) and robust weights of one robust attention to a record."""
    weights = output.weights
    assert weights is not None, "ask robust_attention for its weights"
    queries, keys = weights.shape[-2:]
    positions = torch.arange(keys, device=weights.device, dtype=weights.dtype)
    lag = (positions[keys - queries :, None] - positions).clamp_min(0)  # entries of the future carry no weight

    def heads(value: Tensor | None) -> Tensor | float:
        return 0.0 if value is None else value.to(weights.dtype)[:, None, None]

    m = None if magnitude is None else magnitude.to(weights.dtype)[:, None, None, :]
    shared = dict(mu=heads(noise.mu), eta_k2=heads(noise.eta_k2), sigma02=heads(noise.sigma02))
    shared |= dict(m_inf2=heads(noise.m_inf2), process2=heads(noise.process2))
    kappa = log_kappa(m, lag, **shared)
    kappa_tilde = log_kappa_tilde(m, lag, eta_q2=heads(noise.eta_q2), **shared)
    record.update(weights=weights, log_evidence=output.log_evidence)
    record.update(log_kappa=kappa.expand(*kappa.shape[:-3], -1, -1, -1), log_kappa_tilde=kappa_tilde)
    # A = w kappa / P, so the influence weight of every visible pair is A P / kappa.
    record["robust_weight"] = weights * (output.log_evidence.unsqueeze(-1) - kappa).exp()
    if output.radial_weights is not None:
        record["radial_weights"] = output.radial_weights


def robust_flops(context: int, heads: int, head_dim: int, radial: bool = False) -> int:
    """Forward FLOPs per token of the attention itself: scores, logits, aggregation, and the radial correlation."""
    per_pair = heads * (4 * head_dim + LOGIT_FLOPS)
    if radial:
        per_pair += 2 * heads * head_dim + LOGIT_FLOPS
    return int(mean_visible(context) * per_pair)
