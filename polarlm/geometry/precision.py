"""Directional and radial precisions as functions of magnitude and lag, in the log domain (App. C, Alg. 1 step 3).

    kappa       = (m^2 E^2 + m_inf^2) / (eta_k^2 E^2 + sigma_0^2)              E = exp(-mu * lag)
    kappa_tilde = (m^2 E^2 + m_inf^2) / (eta_k^2 E^2 + eta_q^2 + sigma_0^2)    the residual's, with query noise
    rho         = 1 / (eta_k^2 E^2 + sigma_0^2)                                and rho_tilde likewise

This is the one place where they are written: the filters, the reference attention and the lag tables of the fast
kernels call it. E underflows in fp32 beyond mu*lag = 44, and then log kappa of the naive form is log(0); every sum here
is a logaddexp instead. A floor may be exactly zero (its logarithm is -inf and drops out), and a magnitude may be zero.
All arguments broadcast; the caller aligns magnitude (..., 1, S) with a floating-point lag (T, S).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from polarlm.geometry.multihead import project_evidence

Scalar = float | Tensor

# Attention caps kappa_tilde, so that a token of massive magnitude cannot turn the soft-max into an arg-max.
MAX_QUERY_PRECISION = 1e4
# Magnitudes below this would put log m, and its gradient, out of range.
MIN_MAGNITUDE = 1e-6


def log_kappa(
    magnitude: Tensor | None,
    lag: Tensor,
    *,
    mu: Scalar,
    eta_k2: Scalar,
    sigma02: Scalar,
    m_inf2: Scalar = 0.0,
    m_eq: Scalar | None = None,
    process2: Scalar | None = None,
) -> Tensor:
    """Log of the directional precision kappa; magnitude=None makes the numerator 1 (isotropic RFA)."""
    return log_information(magnitude, lag, mu, m_inf2, m_eq) - log_variance(lag, mu, eta_k2, sigma02, process2)


def log_kappa_tilde(magnitude: Tensor | None, lag: Tensor, *, eta_q2: Scalar, sigma02: Scalar, **noise: Any) -> Tensor:
    """Log of the residual's precision kappa_tilde: kappa with the query's own measurement variance added."""
    return log_kappa(magnitude, lag, sigma02=sigma02 + eta_q2, **noise)


def log_rho(lag: Tensor, *, mu: Scalar, eta_k2: Scalar, sigma02: Scalar) -> Tensor:
    """Log of the radial precision rho."""
    return -log_variance(lag, mu, eta_k2, sigma02)


def log_rho_tilde(lag: Tensor, *, mu: Scalar, eta_k2: Scalar, eta_q2: Scalar, sigma02: Scalar) -> Tensor:
    """Log of the radial residual's precision rho_tilde."""
    return -log_variance(lag, mu, eta_k2, sigma02 + eta_q2)


def prior_depth(magnitude: Scalar, *, eta_k2: Scalar, sigma02: Scalar, m_inf2: Scalar) -> Tensor:
    """log kappa(lag 0) - log kappa(infinity) in nats: > 0 is recency, < 0 anti-recency, 0 no positional prior."""
    near = log_or_minus_infinity(magnitude * magnitude + m_inf2) - log_or_minus_infinity(eta_k2 + sigma02)
    return near - (log_or_minus_infinity(m_inf2) - log_or_minus_infinity(sigma02))


def log_information(
    magnitude: Tensor | None, lag: Tensor, mu: Scalar, m_inf2: Scalar, m_eq: Scalar | None = None
) -> Tensor:
    """log(m^2 E^2 + m_inf^2), the numerator of kappa; with an equilibrium the flow of `carried_magnitude` in it."""
    if magnitude is None:
        return torch.zeros_like(lag)
    if m_eq is not None:
        carried = 2 * carried_magnitude(magnitude.clamp_min(MIN_MAGNITUDE), lag, mu, m_eq).log()
    else:
        carried = 2 * magnitude.clamp_min(MIN_MAGNITUDE).log() - 2 * mu * lag
    return torch.logaddexp(carried, log_or_minus_infinity(m_inf2, lag))


def carried_magnitude(magnitude: Tensor, lag: Tensor, mu: Scalar, m_eq: Scalar) -> Tensor:
    """m_eq + (m - m_eq) E: a flow T_r (Appendix G.2) towards an equilibrium m_eq > 0 instead of the decay m E."""
    return m_eq + (magnitude - m_eq) * torch.exp(-mu * lag)


def log_variance(lag: Tensor, mu: Scalar, eta_k2: Scalar, floor2: Scalar, process2: Scalar | None = None) -> Tensor:
    """log(eta_k^2 E^2 + floor^2 [+ sigma_tilde^2 (1 - E^2)]), the denominator of kappa and rho, finite at any lag."""
    if process2 is not None:
        floor2 = floor2 - process2 * torch.expm1(-2 * mu * lag)  # expm1 keeps its digits at short lags
    return torch.logaddexp(log_or_minus_infinity(eta_k2, lag) - 2 * mu * lag, log_or_minus_infinity(floor2, lag))


def log_or_minus_infinity(value: Scalar, like: Tensor | None = None) -> Tensor:
    """log x with log 0 = -inf and a zero gradient there, so that a floor may be switched off exactly."""
    dtype = like.dtype if like is not None else torch.float64
    x = torch.as_tensor(value, dtype=dtype, device=None if like is None else like.device)
    return torch.where(x > 0, x.clamp_min(torch.finfo(x.dtype).tiny).log(), -math.inf)


# Precision carried from layer to layer (Appendix G.3), in the log domain as evidence always is here.
#
# Prior P- and attention's evidence P_attn (both per head) meet by covariance intersection, which stays conservative
# without knowing how the two are correlated; w in [0, 1] is the prior's share.


def covariance_intersection(log_prior: Tensor, log_evidence: Tensor, prior_share: Scalar) -> tuple[Tensor, Tensor]:
    """log P+ with P+ = w P- + (1-w) P_attn, and the step alpha = (1-w) P_attn / P+ of u+ = u + alpha (u_bar - u)."""
    share = torch.as_tensor(prior_share, dtype=log_prior.dtype, device=log_prior.device)
    from_attention = log_evidence + torch.log1p(-share)
    log_posterior = torch.logaddexp(log_prior + share.log(), from_attention)
    return log_posterior, (from_attention - log_posterior).exp()


def fused_update(v: Tensor, v_bar: Tensor, log_prior: Tensor, log_evidence: Tensor, prior_share: Scalar) -> Tensor:
    """The tangent update that fuses prior and attention: v, v_bar (..., H, Dh), precisions (..., H).

    min_Delta sum_h w P-_h |Delta_h|^2 + (1-w) P_h |Delta_h - delta_h|^2 with <v, Delta> = 0 completes the square to
    sum_h P+_h |Delta_h - alpha_h delta_h|^2: Prop. 5 with alpha_h delta_h and P+_h (docs/theory.md E32).
    """
    log_posterior, alpha = covariance_intersection(log_prior, log_evidence, prior_share)
    return project_evidence(v, torch.lerp(v, v_bar, alpha.unsqueeze(-1)), log_posterior)


def carry_to_next_layer(log_posterior: Tensor, a: Scalar, b: Scalar) -> Tensor:
    """log P- of the next layer: P- = 1 / (a/P+ + b); b > 0 forgets, a > 1 distrusts."""
    return -torch.logaddexp(_log(a, log_posterior) - log_posterior, _log(b, log_posterior))


def log_kappa_tilde_of_uncertain_query(log_kappa_tilde: Tensor, log_prior: Tensor, c: Scalar) -> Tensor:
    """1/kappa_eff = 1/kappa_tilde + c/P-: a query that is unsure of itself asks more gently.

    In variances this is eta_q^2 + c m^2/P-. The printed eta_q^2 + c/P- adds an angle to a length (docs/theory.md E33).
    """
    return widened(log_kappa_tilde, _log(c, log_prior) - log_prior)


def widened(log_precision: Tensor, log_variance: Tensor) -> Tensor:
    """log of 1 / (1/precision + variance)."""
    return -torch.logaddexp(-log_precision, log_variance)


def _log(value: Scalar, like: Tensor) -> Tensor:
    return torch.as_tensor(value, dtype=like.dtype, device=like.device).log()
