"""Everything in the logits that depends on the lag alone, as one row per head: S numbers instead of S² evaluations.

With n_ij = m_j² a + b the numerator of κ is s·n (a = E²/s, b = m∞²/s, s = E² + m∞²), so that
    κ  = n · e^{t1},  t1 = log s − log(η_k²E² + σ0² [+ σ̃²(1−E²)])
    κ̃/d_h = n · t2, log t2 = log s − log(… + η_q²) − log d_h
The split keeps n of the order of m² at every lag, also where E² underflows or a floor is zero. The tables are made
with ordinary differentiable operations.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from polarlm.geometry.precision import log_information, log_or_minus_infinity, log_rho, log_rho_tilde, log_variance

from .noise import DirectionalNoise, RadialNoise

# Rows of a stack of log-tables.
KAPPA, KAPPA_QUERY, OWN, FLOOR = range(4)
# Rows of the slope tables: derivatives of log V by the floor, by η_k² and (per unit of η_k² − σ̃²) by −2μ, where V is
# the variance of κ (1) or of κ̃ (2); then the lag itself.
FLOOR_1, KEY_1, DECAY_1, FLOOR_2, KEY_2, DECAY_2, LAG = range(7)
LARGEST_SLOPE = 60.0  # log: a floor of exactly 0 has no finite derivative at long lags, and none is learned there


def directional_tables(
    noise: DirectionalNoise, lags: int, half: float, magnitude: bool, decay: bool, dtype: torch.dtype
) -> Tensor:
    """Log-tables (rows, H, lags): t1, log t2, then log a and log b with a magnitude, then log E with decay."""
    lag, mu, variance, variance_query = _variances(noise, lags, dtype)
    rows = [-variance, -variance_query - math.log(half)]
    if magnitude:
        m_inf2 = noise.m_inf2.to(dtype)[:, None]
        log_sum = log_information(lag.new_ones(()), lag, mu, m_inf2)
        own, floor = -2 * mu * lag - log_sum, log_or_minus_infinity(m_inf2, lag) - log_sum
        rows = [*(row + log_sum for row in rows), own, floor]
    if decay:
        rows.append(-mu * lag)
    return torch.stack(torch.broadcast_tensors(*rows))


def slope_tables(noise: DirectionalNoise, lags: int, dtype: torch.dtype) -> Tensor:
    """Derivatives of log V = log(η_k²E² + floor² + σ̃²(1−E²)) per lag, (7, H, lags): 1/V, E²/V, Δ·E²/V twice, and Δ."""
    lag, mu, *variances = _variances(noise, lags, dtype)
    rows = []
    for log_v in variances:
        key = torch.exp(-2 * mu * lag - log_v)
        rows += [(-log_v).clamp_max(LARGEST_SLOPE).exp(), key, lag * key]
    return torch.stack(torch.broadcast_tensors(*rows, lag))


def _variances(noise: DirectionalNoise, lags: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The lags (lags,), μ (H,1), and the log-variances of κ and κ̃ (H, lags)."""
    lag = torch.arange(lags, device=noise.mu.device, dtype=dtype)
    mu, eta_k2, sigma02, eta_q2 = (x.to(dtype)[:, None] for x in (noise.mu, noise.eta_k2, noise.sigma02, noise.eta_q2))
    process2 = None if noise.process2 is None else noise.process2.to(dtype)[:, None]
    variance = log_variance(lag, mu, eta_k2, sigma02, process2)
    return lag, mu, variance, log_variance(lag, mu, eta_k2, sigma02 + eta_q2, process2)


def noise_gradient(sums: dict[str, Tensor], noise: DirectionalNoise) -> dict[str, Tensor]:
    """Gradients (H,) of the noise from the sums of `backward_chunk`.

    L depends on the noise through −log V1 (with weight g), log V2 (gated), log E² of the numerator (own) and log m∞²
    (floor); the factor s of the tables cancels because g = gated + own + floor.
    """
    zero = torch.zeros_like(noise.mu)
    process2 = zero if noise.process2 is None else noise.process2
    floor, key, decay = (sums.get(f"gated_{name}", zero) - sums[f"g_{name}"] for name in ("floor", "key", "decay"))
    found = {
        "mu": -2 * (noise.eta_k2 - process2) * decay - 2 * sums.get("own_lag", zero) - sums.get("decay_lag", zero),
        "eta_k2": key,
        "eta_q2": sums.get("gated_floor", zero),
        "sigma02": floor,
        "process2": floor - key,
        "shape": sums.get("shape", zero),
    }
    m_inf2 = noise.m_inf2
    found["m_inf2"] = torch.where(m_inf2 > 0, sums.get("floor", zero) / m_inf2.clamp_min(1e-30), 0)
    return found


def radial_tables(noise: RadialNoise, lags: int, dtype: torch.dtype) -> Tensor:
    """Log-tables (3, 1, lags) of the radial channel: log ρ, log ρ̃, log e^{−μ_rΔ}."""
    lag = torch.arange(lags, device=noise.mu.device, dtype=dtype)
    shared = dict(mu=noise.mu.to(dtype), eta_k2=noise.eta_k2.to(dtype), sigma02=noise.sigma02.to(dtype))
    rho, rho_query = log_rho(lag, **shared), log_rho_tilde(lag, eta_q2=noise.eta_q2.to(dtype), **shared)
    return torch.stack(torch.broadcast_tensors(rho, rho_query, -shared["mu"] * lag))[:, None]


def reversed_tables(log_tables: Tensor, chunk: int) -> Tensor:
    """The log-tables as the loops read them: reversed, and exponentiated but for t1, which masks future keys by −∞."""
    tables = reverse(log_tables, chunk)
    tables[KAPPA, :, log_tables.shape[-1] :] = -math.inf
    tables[1:] = tables[1:].exp()
    return tables


def reverse(tables: Tensor, chunk: int) -> Tensor:
    """Tables from the longest lag to lag 0, then chunk−1 zeros for future keys."""
    return torch.nn.functional.pad(tables.flip(-1), (0, chunk - 1))


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
