"""Robust attention as the paper writes it: every N×N quantity in the open, any device, float64 capable. The oracle.

Shapes: B batch, H query heads, G key/value heads (G divides H), T queries, S keys (the queries are the last T of the
S positions), Dh real head size, d_h = Dh/2 complex modes, D = G·Dh the whole value.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .noise import MAX_QUERY_PRECISION, MIN_MAGNITUDE, AttentionOutput, DirectionalNoise, RadialNoise


def log_or_minus_infinity(x: Tensor) -> Tensor:
    """log x with log 0 = −∞ and a zero gradient there, so that a variance floor may be switched off exactly."""
    tiny = torch.finfo(x.dtype).tiny
    return torch.where(x > 0, x.clamp_min(tiny).log(), -math.inf)


def log_variance(lag: Tensor, mu: Tensor, eta_k2: Tensor, floor2: Tensor, process2: Tensor | None = None) -> Tensor:
    """log(η_k²E² + floor² [+ σ̃²(1−E²)]) with E = e^{−μΔ}, finite at any lag (equation of κ, Algorithm 1 step 3)."""
    if process2 is not None:
        floor2 = floor2 - process2 * torch.expm1(-2 * mu * lag)
    return torch.logaddexp(log_or_minus_infinity(eta_k2) - 2 * mu * lag, log_or_minus_infinity(floor2))


def allowed_pairs(queries: int, keys: int, documents: Tensor | None, device: torch.device) -> Tensor:
    """Which key a query may see, (1 or B, T, S): not later than itself, and in the same document."""
    i = torch.arange(keys - queries, keys, device=device)[:, None]
    allowed = (i >= torch.arange(keys, device=device))[None]
    if documents is not None:
        allowed = allowed & (documents[:, -queries:, None] == documents[:, None, :])
    return allowed


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    magnitude: Tensor | None,
    noise: DirectionalNoise,
    *,
    kernel: str,
    decay_keys: bool,
    decay_values: bool,
    radial: RadialNoise | None,
    radial_mode: str,
    documents: Tensor | None,
    dropout: float,
    return_weights: bool,
    residual_form: str = "full",
) -> AttentionOutput:
    """Robust attention with every intermediate materialised; arguments as in `robust_attention`."""
    score_dtype = torch.promote_types(q.dtype, torch.float32)
    groups = q.shape[1] // k.shape[1]
    q_, k_, v_ = (x.to(score_dtype) for x in (q, k, v))
    k_heads, v_heads = (x.repeat_interleave(groups, dim=1) for x in (k_, v_))  # (B,H,S,Dh)
    T, S, half = q.shape[2], k.shape[2], q.shape[3] / 2

    lag = torch.arange(S - T, S, device=q.device)[:, None] - torch.arange(S, device=q.device)  # (T,S), Δ = i − j
    lag = lag.clamp_min(0).to(score_dtype)  # the future is masked below
    allowed = allowed_pairs(T, S, documents, q.device)

    def per_head(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(score_dtype)[:, None, None]

    mu, eta_k2, process2 = per_head(noise.mu), per_head(noise.eta_k2), per_head(noise.process2)
    sigma02, eta_q2 = per_head(noise.sigma02), per_head(noise.eta_q2)
    E = torch.exp(-mu * lag)  # (H,T,S)

    # κ = (m²E² + m∞²)/(η_k²E² + σ0²), κ̃ the same with η_q² added to the variance
    if magnitude is None:
        log_numerator = torch.zeros((), dtype=score_dtype, device=q.device)
    else:
        m = magnitude.to(score_dtype).clamp_min(MIN_MAGNITUDE)
        log_m2 = 2 * m.log()[:, None, None, :]  # (B,1,1,S)
        log_numerator = torch.logaddexp(log_m2 - 2 * mu * lag, log_or_minus_infinity(per_head(noise.m_inf2)))
    log_kappa = log_numerator - log_variance(lag, mu, eta_k2, sigma02, process2)
    log_kappa_q = log_numerator - log_variance(lag, mu, eta_k2, sigma02 + eta_q2, process2)
    log_kappa_q = log_kappa_q.clamp_max(math.log(MAX_QUERY_PRECISION))

    # L = log κ + log w(x), x = κ̃‖R‖²/d_h
    key_decay = E if decay_keys else 1.0
    dots = q_ @ k_heads.transpose(-1, -2)
    residual = -2 * key_decay * dots
    if residual_form == "full":
        squared = q_.square().sum(-1)[..., :, None] + key_decay**2 * k_heads.square().sum(-1)[..., None, :]
        residual = (squared + residual).clamp_min(0)
    x = log_kappa_q.exp() * residual / half
    if kernel == "student":
        nu = per_head(noise.nu)
        logits = log_kappa - (nu + 1) * torch.log1p(x / nu)
    elif kernel == "exponential":
        logits = log_kappa - x / per_head(noise.tau)
    else:
        logits = log_kappa + torch.zeros_like(dots)

    logits = logits.masked_fill(~allowed[:, None], -math.inf)
    log_evidence = logits.logsumexp(-1)
    weights = torch.exp(logits - log_evidence[..., None])
    applied = F.dropout(weights, dropout)
    v_bar = (applied * E if decay_values else applied) @ v_heads

    m_bar = radial_weights = None
    if radial_mode != "off":
        m_bar, radial_weights = _radial(v_, magnitude.to(score_dtype), radial, radial_mode, weights, lag, allowed)
    kept = (weights, radial_weights) if return_weights else (None, None)
    return AttentionOutput(v_bar.to(v.dtype), log_evidence, m_bar, *kept)


def _radial(
    v: Tensor, m: Tensor, noise: RadialNoise, mode: str, weights: Tensor, lag: Tensor, allowed: Tensor
) -> tuple[Tensor, Tensor]:
    whole = v.transpose(1, 2).flatten(2)  # (B,S,D): the radial channel sees all heads at once
    T = lag.shape[0]
    cosine = whole[:, -T:] @ whole.transpose(1, 2) / whole.shape[-1]  # ‖v‖ = √D, so ⟨v_i,v_j⟩/D is c_ij
    scalars = (noise.mu, noise.eta_k2, noise.eta_q2, noise.sigma02, noise.nu)
    mu, eta_k2, eta_q2, sigma02, nu = (x.to(v.dtype) for x in scalars)
    predicted = cosine * torch.exp(-mu * lag) * m[:, None, :]  # c_ij m̂_ij
    if mode == "own":
        log_rho = -log_variance(lag, mu, eta_k2, sigma02)
        rho_q = torch.exp(-log_variance(lag, mu, eta_k2, sigma02 + eta_q2))
        d2 = rho_q * (predicted - m[:, -T:, None]).square()
        logits = log_rho - (nu + 1) * torch.log1p(d2 / nu)  # with the exponent (ν_r+1) of Appendix C (reading.md E1)
        radial_weights = logits.masked_fill(~allowed, -math.inf).softmax(-1)
    else:
        radial_weights = weights.mean(1)
    return (radial_weights * predicted).sum(-1), radial_weights
