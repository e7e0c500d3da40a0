"""The element-wise part of one chunk of robust attention, forward and backward, written to be fused into one loop.

Per weight: one logarithm (Student-t only) and one exponential in either direction; everything else comes from lag
tables. Shapes: scores (B,H,C,K), a value per query (B,H,C), per key (B,H,K), per head (H,); tables (rows,H,C+K−1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from polarlm.geometry.precision import MAX_QUERY_PRECISION

from .lag_tables import (
    DECAY_1,
    DECAY_2,
    FLOOR,
    FLOOR_1,
    FLOOR_2,
    KAPPA,
    KAPPA_QUERY,
    KEY_1,
    KEY_2,
    LAG,
    OWN,
    windows,
)

LOG2_E = 1.4426950408889634


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


def exp(x: Tensor) -> Tensor:
    """e^x as a power of two: inductor writes every torch.exp that is used twice to memory first."""
    return torch.exp2(LOG2_E * x)


def logits_chunk(dots, q2, k2, m2, shape, same_document, tables, *, half, kernel, decay_keys):
    """Turns dot products into logits without log n, in place."""
    at_lag = windows(tables, dots.shape[-1])
    *_, G = _scores(dots, q2, k2, m2, shape, same_document, at_lag, half, kernel, decay_keys)
    dots.copy_(G)


def weights_chunk(logits, decayed, top, m2, tables):
    """Turns logits into weights n·e^{G−top}, in place and not normalised; `decayed` (or None) gets E times that."""
    at_lag = windows(tables, logits.shape[-1])
    weights = exp(logits - top)
    if m2 is not None:
        weights = (m2[:, None, None, :] * at_lag[OWN] + at_lag[FLOOR]) * weights
    if decayed is not None:
        decayed.copy_(weights * at_lag[-1])
    logits.copy_(weights)


def backward_chunk(
    dots, d_weights, d_dots, own, d_k2, q2, k2, m2, shape, log_evidence, delta, same_document, tables, slopes,
    *, half, kernel, decay_keys, decay_values,
):  # fmt: skip
    """Gradients of one chunk, recomputed from its dot products.

    Returns the weights that multiply dO (for ∂v), per query Σ_j ∂R², and sums over keys by name: `shape` for ν or τ,
    the others for `noise_gradient`. Fills `d_dots`, `own` (with a magnitude; its sum over queries is m_j² ∂m_j²) and
    `d_k2` (with decaying keys; otherwise −½ d_dots).
    """
    at_lag, slope = windows(tables, dots.shape[-1]), windows(slopes, dots.shape[-1])
    n, capped, free, r2, y, G = _scores(dots, q2, k2, m2, shape, same_document, at_lag, half, kernel, decay_keys)
    # torch.exp, not `exp`: inductor writes a reused exponential to memory at once, and with a store before them all the
    # sums below share its loop. (A store after the sums would get a loop of its own, with everything computed again.)
    weights = torch.exp(G - log_evidence[..., None])
    if n is not None:
        weights = n * weights
    decay = at_lag[-1]  # E, where anything decays
    applied = weights * decay if decay_values else weights
    g = applied * d_weights - weights * delta[..., None]  # ∂L = A(∂A − Σ_j A ∂A + ∂ log-evidence)
    sums = {"g_floor": (g * slope[FLOOR_1]).sum(-1), "g_key": (g * slope[KEY_1]).sum(-1)}
    sums["g_decay"] = (g * slope[DECAY_1]).sum(-1)

    d_decay = applied * d_weights if decay_values else None
    gated, q2_sum = torch.zeros_like(g), None  # gated: −∂/∂log κ̃
    if kernel != "gaussian":
        inverse = (1 / shape)[:, None, None]
        if kernel == "student":
            g_slope = g * ((shape + 1)[:, None, None] / (1 + y))  # −∂/∂y
            sums["shape"] = (g_slope * y * inverse - g * log1p(y)).sum(-1)
        else:
            g_slope = g
            sums["shape"] = (g * y * inverse).sum(-1)
        d_r2 = torch.where(r2 >= 0, -g_slope * capped * inverse, 0)
        q2_sum = d_r2.sum(-1)
        gated = torch.where(free <= MAX_QUERY_PRECISION / half, g_slope * y, 0)
        sums["gated_floor"] = (gated * slope[FLOOR_2]).sum(-1)
        sums["gated_key"] = (gated * slope[KEY_2]).sum(-1)
        sums["gated_decay"] = (gated * slope[DECAY_2]).sum(-1)
        if decay_keys:
            d_decay_keys = 2 * d_r2 * decay * (decay * k2[..., None, :] - dots)
            d_decay = d_decay_keys if d_decay is None else d_decay + d_decay_keys
            d_k2.copy_(d_r2 * decay * decay)
            d_dots.copy_(-2 * d_r2 * decay)
        else:
            d_dots.copy_(-2 * d_r2)
    if n is not None:
        rest = (g - gated) / n
        found = rest * m2[:, None, None, :] * at_lag[OWN]
        own.copy_(found)
        sums["own_lag"] = (found * slope[LAG]).sum(-1)
        sums["floor"] = (rest * at_lag[FLOOR]).sum(-1)
    if d_decay is not None:
        sums["decay_lag"] = (d_decay * slope[LAG]).sum(-1)
    return applied, q2_sum, sums
