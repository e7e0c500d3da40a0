"""The element-wise part of one chunk of robust attention, forward and backward, written to be fused into one loop.

Per weight: one logarithm (Student-t only) and one exponential in either direction; everything else comes from lag
tables. Shapes: scores (B,H,C,K), a value per query (B,H,C), per key (B,H,K), per head (H,); tables (rows,H,C+K−1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .lag_tables import FLOOR, KAPPA, KAPPA_QUERY, OWN, windows
from .noise import MAX_QUERY_PRECISION

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
    dots, d_weights, out, q2, k2, m2, shape, log_evidence, delta, same_document, tables,
    *, half, kernel, decay_keys, decay_values,
):  # fmt: skip
    """Gradients of one chunk, recomputed from its dot products.

    Fills the matrices of `out` (those of `backward_matrices`); summing them is left to the caller: a loop without sums
    stays one loop, and each sum costs one more reading.
    """
    at_lag = windows(tables, dots.shape[-1])
    n, capped, free, r2, y, G = _scores(dots, q2, k2, m2, shape, same_document, at_lag, half, kernel, decay_keys)
    weights = exp(G - log_evidence[..., None])
    if n is not None:
        weights = n * weights
    decay = at_lag[-1] if decay_keys or decay_values else None
    applied = weights * decay if decay_values else weights
    g = applied * d_weights - weights * delta[..., None]  # ∂L = A(∂A − Σ_j A ∂A + ∂ log-evidence)
    out["applied"].copy_(applied)

    d_decay = applied * d_weights if decay_values else None
    gated = torch.zeros_like(g)
    if kernel != "gaussian":
        inverse = (1 / shape)[:, None, None]
        if kernel == "student":
            g_slope = g * ((shape + 1)[:, None, None] / (1 + y))  # −∂/∂y
            out["shape"].copy_(g_slope * y * inverse - g * log1p(y))
        else:
            g_slope = g
            out["shape"].copy_(g * y * inverse)
        d_r2 = torch.where(r2 >= 0, -g_slope * capped * inverse, 0)
        gated = torch.where(free <= MAX_QUERY_PRECISION / half, g_slope * y, 0)
        if decay_keys:
            d_decay_keys = 2 * d_r2 * decay * (decay * k2[..., None, :] - dots)
            d_decay = d_decay_keys if d_decay is None else d_decay + d_decay_keys
            out["d_r2"].copy_(d_r2)
            out["d_k2"].copy_(d_r2 * decay * decay)
            out["d_dots"].copy_(-2 * d_r2 * decay)
        else:
            out["d_dots"].copy_(-2 * d_r2)
    out["gated"].copy_(gated)
    if n is None:
        out["g"].copy_(g)
    else:
        rest = (g - gated) / n
        out["own"].copy_(rest * m2[:, None, None, :] * at_lag[OWN])
        out["floor"].copy_(rest * at_lag[FLOOR])
    if d_decay is not None:
        out["decay"].copy_(d_decay)


def backward_matrices(kernel: str, magnitude: bool, decay_keys: bool, decay_values: bool) -> list[str]:
    """What `backward_chunk` fills, (B,H,C,K) each.

    `applied`: weights that multiply dO; `d_dots`: ∂/∂(q·k); `d_r2`, `d_k2`: ∂R² and its share of ‖k‖² where they are not
    −½ ∂/∂(q·k); `shape`: of ν or τ. Summed along lags, gradients of the log-tables: `g` of t1, `gated` of −log t2,
    `own` and `floor` of a and b (g = gated + own + floor), `decay` of log E.
    """
    names = ["applied", "gated", *(["own", "floor"] if magnitude else ["g"])]
    names += [] if kernel == "gaussian" else ["d_dots", "shape"]
    names += ["d_r2", "d_k2"] if decay_keys else []
    return names + (["decay"] if decay_keys or decay_values else [])
