"""The element-wise part of one chunk of robust attention, forward and backward, written to be fused into one loop.

Per weight: one logarithm (Student-t only) and one exponential in either direction; everything else comes from lag
tables. Shapes: scores (B,H,C,K), a value per query (B,H,C), per key (B,H,K), per head (H,); tables (rows,H,C+K−1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .lag_tables import FLOOR, KAPPA, KAPPA_QUERY, OWN, windows
from .noise import MAX_QUERY_PRECISION


def log1p(y: Tensor) -> Tensor:
    """log(1+y) for y ≥ 0 to fp32 accuracy, from the cheaper plain logarithm plus what rounding 1+y lost."""
    one_plus = 1 + y
    return torch.log(one_plus) + torch.where(y < 1, y - (one_plus - 1), 0)


def _scores(dots, q2, k2, m2, shape, same_document, at_lag, half, kernel, decay_keys):
    """n, capped κ̃/d_h, whether it is below the cap, R² (before clamping), y = x/ν or x/τ, and G = L − log n."""
    n = None
    if m2 is not None:
        n = m2[:, None, None, :] * at_lag[OWN] + at_lag[FLOOR]
    G = at_lag[KAPPA]
    if same_document is not None:
        G = torch.where(same_document[:, None], G, -torch.inf)
    if kernel == "gaussian":
        return n, None, None, None, None, G + torch.zeros_like(dots)
    free = at_lag[KAPPA_QUERY]
    free = free if n is None else n * free
    capped = free.clamp_max(MAX_QUERY_PRECISION / half)
    if decay_keys:
        decay = at_lag[-1]
        r2 = q2[..., None] + decay * (decay * k2[..., None, :] - 2 * dots)
    else:
        r2 = q2[..., None] + k2[..., None, :] - 2 * dots
    y = capped * r2.clamp_min(0) * (1 / shape)[:, None, None]
    if kernel == "student":
        G = G - (shape + 1)[:, None, None] * log1p(y)
    else:
        G = G - y
    return n, capped, free, r2, y, G


def forward_chunk(dots, q2, k2, m2, shape, same_document, tables, *, half, kernel, decay_keys, decay_values):
    """Turn dot products into un-normalised weights e^{L−top} (in place); returns top and their sum, both (B,H,C)."""
    at_lag = windows(tables, dots.shape[-1])
    n, _, _, _, _, G = _scores(dots, q2, k2, m2, shape, same_document, at_lag, half, kernel, decay_keys)
    top = G.amax(-1, keepdim=True)
    weights = torch.exp(G - top)
    if n is not None:
        weights = n * weights
    total = weights.sum(-1)
    dots.copy_(weights * at_lag[-1] if decay_values else weights)
    return top[..., 0], total


def backward_chunk(
    dots, d_weights, per_lag, per_key, q2, k2, m2, shape, log_evidence, delta, same_document, tables,
    *, half, kernel, decay_keys, decay_values,
):  # fmt: skip
    """Gradients of one chunk, recomputed from its dot products.

    Overwrites `dots` with the weights that multiply dO (for ∂v) and `d_weights` with ∂/∂dots; fills
    `per_lag` (N,B,H,C,K), whose sums along lags are the gradients of the log-tables [t1, a, b or t2, E], and `per_key`
    (decay_keys only) with E·∂/∂dots. Returns per query Σ_j ∂R² and the gradient of ν or τ.
    """
    at_lag = windows(tables, dots.shape[-1])
    n, capped, free, r2, y, G = _scores(dots, q2, k2, m2, shape, same_document, at_lag, half, kernel, decay_keys)
    weights = torch.exp(G - log_evidence[..., None])
    if n is not None:
        weights = n * weights
    decay = at_lag[-1] if decay_keys or decay_values else None
    applied = weights * decay if decay_values else weights
    g = applied * d_weights - weights * delta[..., None]  # ∂L = A(∂A − Σ_j A ∂A + ∂ log-evidence)
    per_lag[0].copy_(g)

    d_decay = applied * d_weights if decay_values else None
    q2_sum = shape_sum = None
    if kernel == "gaussian":
        gated = torch.zeros_like(g)  # −∂L/∂log κ̃
        d_weights.zero_()
    else:
        inverse = (1 / shape)[:, None, None]
        if kernel == "student":
            slope = (shape + 1)[:, None, None] / (1 + y)  # −∂L/∂y
            shape_sum = (g * (slope * y * inverse - log1p(y))).sum(-1)
        else:
            slope = 1.0
            shape_sum = (g * y * inverse).sum(-1)
        d_r2 = torch.where(r2 >= 0, -g * slope * capped * inverse, 0)
        gated = torch.where(free <= MAX_QUERY_PRECISION / half, g * slope * y, 0)
        q2_sum = d_r2.sum(-1)
        d_dots = -2 * d_r2
        if decay_keys:
            d_decay_keys = 2 * d_r2 * decay * (decay * k2[..., None, :] - dots)
            d_decay = d_decay_keys if d_decay is None else d_decay + d_decay_keys
            d_dots = d_dots * decay
            per_key.copy_(d_dots * decay)
        d_weights.copy_(d_dots)
    if n is None:
        per_lag[1].copy_(gated)
    else:
        rest = (g - gated) / n
        per_lag[1].copy_(rest * m2[:, None, None, :] * at_lag[OWN])
        per_lag[2].copy_(rest * at_lag[FLOOR])
    if d_decay is not None:
        per_lag[-1].copy_(d_decay)
    dots.copy_(applied)
    return q2_sum, shape_sum
