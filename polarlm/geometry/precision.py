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
