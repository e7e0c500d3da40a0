"""Everything in the logits that depends on the lag alone, as one row per head: S numbers instead of S² evaluations.

With n_ij = m_j² a + b the numerator of κ is s·n (a = E²/s, b = m∞²/s, s = E² + m∞²), so that
    κ  = n · e^{t1},  t1 = log s − log(η_k²E² + σ0² [+ σ̃²(1−E²)])
    κ̃/d_h = n · t2, log t2 = log s − log(… + η_q²) − log d_h
The split keeps n of the order of m² at every lag, also where E² underflows or a floor is zero. The tables are made
with ordinary differentiable operations; a backend only returns the gradient of each table.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .noise import DirectionalNoise, RadialNoise
from .reference import log_or_minus_infinity, log_variance

# Rows of a stack of log-tables.
KAPPA, KAPPA_QUERY, OWN, FLOOR = range(4)


def directional_tables(noise: DirectionalNoise, lags: int, half: float, magnitude: bool, decay: bool, dtype) -> Tensor:
    """Log-tables (rows, H, lags): t1, log t2, then log a and log b with a magnitude, then log E with decay."""
    lag = torch.arange(lags, device=noise.mu.device, dtype=dtype)

    def per_head(x: Tensor) -> Tensor:
        return x.to(dtype)[:, None]

    mu, eta_k2, sigma02 = per_head(noise.mu), per_head(noise.eta_k2), per_head(noise.sigma02)
    process2 = None if noise.process2 is None else per_head(noise.process2)
    log_kappa = -log_variance(lag, mu, eta_k2, sigma02, process2)
    log_kappa_query = -log_variance(lag, mu, eta_k2, sigma02 + per_head(noise.eta_q2), process2) - math.log(half)
    rows = [log_kappa, log_kappa_query]
    if magnitude:
        log_decay2, log_floor = -2 * mu * lag, log_or_minus_infinity(per_head(noise.m_inf2)).expand(-1, lags)
        log_sum = torch.logaddexp(log_decay2, log_floor)
        rows = [log_kappa + log_sum, log_kappa_query + log_sum, log_decay2 - log_sum, log_floor - log_sum]
    if decay:
        rows.append(-mu * lag)
    return torch.stack(torch.broadcast_tensors(*rows))


def radial_tables(noise: RadialNoise, lags: int, dtype) -> Tensor:
    """Log-tables (3, 1, lags) of the radial channel: log ρ, log ρ̃, log e^{−μ_rΔ}."""
    lag = torch.arange(lags, device=noise.mu.device, dtype=dtype)
    mu, eta_k2, eta_q2, sigma02 = (x.to(dtype) for x in (noise.mu, noise.eta_k2, noise.eta_q2, noise.sigma02))
    log_rho = -log_variance(lag, mu, eta_k2, sigma02)
    log_rho_query = -log_variance(lag, mu, eta_k2, sigma02 + eta_q2)
    return torch.stack(torch.broadcast_tensors(log_rho, log_rho_query, -mu * lag))[:, None]


def reversed_tables(log_tables: Tensor, chunk: int) -> Tensor:
    """The tables as the loops read them: from the longest lag to lag 0, then chunk−1 entries for future keys.

    Future keys get t1 = −∞, which is the causal mask; the other rows are exponentiated here, once per lag.
    """
    reverse = log_tables.flip(-1)
    future = torch.zeros_like(reverse[..., :1]).expand(*reverse.shape[:-1], chunk - 1).clone()
    future[KAPPA] = -math.inf
    tables = torch.cat([reverse, future], -1)
    tables[1:] = tables[1:].exp()
    return tables


def table_slice(tables: Tensor, lags: int, keys: int, queries: int) -> Tensor:
    """The part of reversed tables that `queries` rows over `keys` columns need, ready for `windows`."""
    return tables[..., lags - keys : lags + queries - 1].clone(memory_format=torch.contiguous_format)


def windows(tables: Tensor, keys: int) -> Tensor:
    """(rows,H,C+K−1) -> (rows,H,C,K): entry (i, j) is the value at the lag of query i and key j.

    Overlapping rows of one table: a fused loop reads it in place. Without fusion it is written out, once for all rows
    of the batch, because operands without an order of their own would give their results a transposed one.
    """
    rows, heads, length = tables.shape
    strides = (heads * length, length, 1, 1)
    return tables.as_strided((rows, heads, length - keys + 1, keys), strides).flip(-2).contiguous()


def lag_sums(pairs: Tensor) -> Tensor:
    """Sums along equal lags, from the longest to 0: contiguous (B, H, C, K), zero where a key lies ahead -> (H, K).

    Reading rows with a stride of K+1 lines up equal lags in columns; what a row reads beyond its own beginning is the
    masked end of the row before, which is zero. Row 0 has no row before it and is added by itself.
    """
    batch, heads, queries, keys = pairs.shape
    block = queries * keys
    start = pairs.storage_offset() + keys + 1 - (queries - 1)
    rows = pairs.as_strided((batch * heads, queries - 1, keys), (block, keys + 1, 1), start)
    ones = pairs.new_ones(1, 1, 1).expand(batch * heads, 1, queries - 1)
    sums = torch.bmm(ones, rows).view(batch, heads, keys).sum(0)  # a product, because sums over odd strides are slow
    sums[:, queries - 1 :] += pairs[:, :, 0, : keys - queries + 1].sum(0)
    return sums
