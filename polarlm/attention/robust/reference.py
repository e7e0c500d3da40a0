"""Robust attention as in the paper, with all N×N quantities, on any device and in any precision: the tests' reference.

Shapes as in call.py; D = G·Dh is the whole value.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from polarlm.geometry.precision import (
    MAX_QUERY_PRECISION,
    carried_magnitude,
    log_information,
    log_rho,
    log_rho_tilde,
    log_variance,
    widened,
)
from polarlm.geometry.robust import causal_mask

from .call import AttentionOutput, RobustCall, Weights
from .consensus import angular_residual, gated_weights, quarter_back


def _lags(call: RobustCall) -> Tensor:
    """Δ = i − j of every pair, (T,S); 0 in the future, which is masked."""
    queries, keys, device = call.q.shape[2], call.k.shape[2], call.q.device
    lag = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
    return lag.clamp_min(0).to(call.score_dtype)


def reference_attention(call: RobustCall) -> AttentionOutput:
    """Robust attention with every intermediate materialised."""
    dtype, noise = call.score_dtype, call.noise
    groups = call.q.shape[1] // call.k.shape[1]
    q, k, v = (x.to(dtype) for x in (call.q, call.k, call.v))
    k_heads, v_heads = (x.repeat_interleave(groups, dim=1) for x in (k, v))  # (B,H,S,Dh)
    T, S = q.shape[2], k.shape[2]

    lag, allowed = _lags(call), causal_mask(T, S, call.documents, q.device)

    def per_head(x: Tensor) -> Tensor:
        return x.to(dtype)[:, None, None]

    # Everything ages by one tensor μΔ (H,T,S): what κ's two halves say about μ then cancels pair by pair, not in sums.
    age = per_head(noise.mu) * lag
    eta_k2, eta_q2, sigma02 = per_head(noise.eta_k2), per_head(noise.eta_q2), per_head(noise.sigma02)
    process2 = None if noise.process2 is None else per_head(noise.process2)
    m = None if call.magnitude is None else call.magnitude.to(dtype)[:, None, None, :]  # (B,1,1,S)
    m_eq = None if call.equilibrium is None else call.equilibrium.to(dtype)
    information = log_information(m, age, 1.0, per_head(noise.m_inf2), m_eq)  # of κ and of κ̃: formed once
    kappa = information - log_variance(age, 1.0, eta_k2, sigma02, process2)  # (B or 1,H,T,S), logarithms both
    kappa_tilde = information - log_variance(age, 1.0, eta_k2, sigma02 + eta_q2, process2)
    of_measurement = kappa  # what the gate is derived from
    kappa, kappa_tilde = _widened(call, kappa, kappa_tilde)
    kappa_tilde = kappa_tilde.clamp_max(math.log(MAX_QUERY_PRECISION))

    # L = log κ + log w(x), x = κ̃‖R‖²/d_h
    E = torch.exp(-age)
    key_decay = E if call.decay_keys else 1.0
    if call.consensus != "none":
        residual = angular_residual(call, q, k_heads)
    else:
        residual = -2 * key_decay * (q @ k_heads.transpose(-1, -2))
    if call.consensus == "none" and call.residual_form == "full":
        squared = q.square().sum(-1)[..., :, None] + key_decay**2 * k_heads.square().sum(-1)[..., None, :]
        residual = (squared + residual).clamp_min(0)
    x = kappa_tilde.exp() * residual / call.half
    shape = per_head(noise.shape(call.kernel))  # ν or τ
    if call.kernel == "student":
        log_robust = -(shape + 1) * torch.log1p(x / shape)
    elif call.kernel == "student_mle":
        log_robust = -torch.log1p(x / shape)
    elif call.kernel == "exponential":
        log_robust = -x / shape
    else:
        log_robust = torch.zeros_like(residual)
    logits = kappa + log_robust
    if call.forgotten is not None:  # κ times the λ of every token after the key
        since = call.forgotten.to(dtype)
        logits = logits + (since[..., -T:, None] - since[..., None, :])

    logits = logits.masked_fill(~allowed.unsqueeze(-3), -math.inf)
    log_evidence = logits.logsumexp(-1)
    weights = torch.exp(logits - log_evidence[..., None])
    gate = gated = None
    if call.consensus != "none":
        tau = -log_variance(age, 1.0, eta_k2, sigma02)
        log_weights = logits - log_evidence[..., None]
        gated, turned = gated_weights(call, log_weights, of_measurement, tau, lag, age, q, k_heads, v_heads)
        kept_pairs = F.dropout(torch.ones_like(gated), call.dropout)
        v_bar, gate = _sum_gated(gated * kept_pairs, None if turned is None else turned * kept_pairs, v_heads)
    else:
        applied = F.dropout(weights, call.dropout)
        v_bar = (applied * E if call.decay_values else applied) @ v_heads

    m_bar = radial_weights = None
    if call.radial_mode != "off":
        m_bar, radial_weights = _radial(call, v, weights, lag, allowed)
    kept = None
    if call.return_weights:
        kappa, kappa_tilde = (x if x.dim() == 4 else x[None] for x in (kappa, kappa_tilde))
        robust = log_robust.exp().masked_fill(~allowed.unsqueeze(-3), 0)
        brought = weights * E if call.decay_values else weights  # what a token's value is multiplied by
        kept = Weights(brought, kappa, kappa_tilde, robust, radial_weights, gated)
    return AttentionOutput(v_bar.to(call.v.dtype), log_evidence, m_bar, gate, kept)


def _widened(call: RobustCall, kappa: Tensor, kappa_tilde: Tensor) -> tuple[Tensor, Tensor]:
    """log κ and log κ̃ with the angular variances that tokens bring along."""
    if call.log_key_variance is not None:
        of_keys = call.log_key_variance.to(kappa.dtype)[:, :, None, :]
        kappa, kappa_tilde = widened(kappa, of_keys), widened(kappa_tilde, of_keys)
    if call.log_query_variance is not None:
        kappa_tilde = widened(kappa_tilde, call.log_query_variance.to(kappa.dtype)[..., None])
    return kappa, kappa_tilde


def _sum_gated(real: Tensor, imaginary: Tensor | None, v: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_j A g v and Σ_j A Re g; a complex g multiplies the modes of v."""
    gated = real @ v if imaginary is None else real @ v - imaginary @ quarter_back(v)
    return gated, real.sum(-1)


def radial_estimate(call: RobustCall) -> Tensor:
    """m̄ (B,T) alone, of a call whose radial weights are its own."""
    allowed = causal_mask(call.q.shape[2], call.k.shape[2], call.documents, call.q.device)
    return _radial(call, call.v.to(call.score_dtype), None, _lags(call), allowed)[0]


def _radial(call: RobustCall, v: Tensor, weights: Tensor | None, lag: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """m̄ (B,T) and its weights (B,T,S)."""
    noise, magnitude = call.radial, call.magnitude
    assert noise is not None and magnitude is not None, "RobustCall.check sees to it"
    m, T = magnitude.to(v.dtype), lag.shape[0]
    mu, nu = noise.mu.to(v.dtype), noise.nu.to(v.dtype)
    if call.equilibrium is None:
        predicted = call.cosine() * torch.exp(-mu * lag) * m[:, None, :]  # c_ij m̂_ij
    else:
        predicted = call.cosine() * carried_magnitude(m[:, None, :], lag, mu, call.equilibrium.to(v.dtype))
    if call.radial_mode == "own":
        shared = dict(mu=mu, eta_k2=noise.eta_k2.to(v.dtype), sigma02=noise.sigma02.to(v.dtype))
        d2 = (
            log_rho_tilde(lag, eta_q2=noise.eta_q2.to(v.dtype), **shared).exp() * (predicted - m[:, -T:, None]).square()
        )
        # With the exponent ν_r + 1 of Appendix C, which Algorithm 1 drops (docs/theory.md).
        logits = log_rho(lag, **shared) - (nu + 1) * torch.log1p(d2 / nu)
        radial_weights = logits.masked_fill(~allowed, -math.inf).softmax(-1)
    else:
        assert weights is not None, "shared weights are those of the directional channel"
        radial_weights = weights.mean(1)
    return (radial_weights * predicted).sum(-1), radial_weights
