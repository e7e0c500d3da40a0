"""Directional and radial precisions as functions of magnitude and lag, in the log domain (App. C, Alg. 1 step 3).

    kappa       = (m^2 E^2 + m_inf^2) / (eta_k^2 E^2 + sigma_0^2)              E = exp(-mu * lag)
    kappa_tilde = (m^2 E^2 + m_inf^2) / (eta_k^2 E^2 + eta_q^2 + sigma_0^2)    the residual's, with query noise
    rho         = 1 / (eta_k^2 E^2 + sigma_0^2)                                and rho_tilde likewise

E underflows in fp32 beyond mu*lag = 44, and then log kappa of the naive form is log(0); every sum here is a logaddexp
instead. A floor may be exactly zero (its logarithm is -inf and drops out), and a magnitude may be zero.
All arguments broadcast; the caller aligns magnitude (..., 1, S) with a floating-point lag (T, S).
"""

from __future__ import annotations

import torch
from torch import Tensor

Scalar = float | Tensor


def log_kappa(
    magnitude: Tensor | None,
    lag: Tensor,
    *,
    mu: Scalar,
    eta_k2: Scalar,
    sigma02: Scalar,
    m_inf2: Scalar = 0.0,
    process2: Scalar = 0.0,
) -> Tensor:
    """Log of the directional precision kappa; magnitude=None makes the numerator 1 (isotropic RFA)."""
    return _log_information(magnitude, lag, mu, m_inf2) - _log_variance(lag, mu, eta_k2, sigma02, process2)


def log_kappa_tilde(
    magnitude: Tensor | None,
    lag: Tensor,
    *,
    mu: Scalar,
    eta_k2: Scalar,
    eta_q2: Scalar,
    sigma02: Scalar,
    m_inf2: Scalar = 0.0,
    process2: Scalar = 0.0,
) -> Tensor:
    """Log of the residual's precision kappa_tilde: kappa with the query's own measurement variance added."""
    variance = _log_variance(lag, mu, eta_k2, sigma02 + eta_q2, process2)
    return _log_information(magnitude, lag, mu, m_inf2) - variance


def log_rho(lag: Tensor, *, mu: Scalar, eta_k2: Scalar, sigma02: Scalar) -> Tensor:
    """Log of the radial precision rho."""
    return -_log_variance(lag, mu, eta_k2, sigma02)


def log_rho_tilde(lag: Tensor, *, mu: Scalar, eta_k2: Scalar, eta_q2: Scalar, sigma02: Scalar) -> Tensor:
    """Log of the radial residual's precision rho_tilde."""
    return -_log_variance(lag, mu, eta_k2, sigma02 + eta_q2)


def prior_depth(magnitude: Scalar, *, eta_k2: Scalar, sigma02: Scalar, m_inf2: Scalar) -> Tensor:
    """log kappa(lag 0) - log kappa(infinity) in nats: > 0 is recency, < 0 anti-recency, 0 no positional prior."""
    near = _log(magnitude * magnitude + m_inf2) - _log(eta_k2 + sigma02)
    return near - (_log(m_inf2) - _log(sigma02))


def _log_information(magnitude: Tensor | None, lag: Tensor, mu: Scalar, m_inf2: Scalar) -> Tensor:
    if magnitude is None:
        return torch.zeros_like(lag)
    # m = 0 is legal: the clamp keeps log m and its gradient finite when m_inf is zero too.
    log_m2 = 2.0 * magnitude.clamp_min(torch.finfo(magnitude.dtype).tiny).log()
    return torch.logaddexp(log_m2 - 2.0 * mu * lag, _log(m_inf2, lag))


def _log_variance(lag: Tensor, mu: Scalar, key2: Scalar, floor2: Scalar, process2: Scalar = 0.0) -> Tensor:
    decay = -2.0 * mu * lag  # log E^2
    log_variance = torch.logaddexp(_log(key2, lag) + decay, _log(floor2, lag))
    if isinstance(process2, Tensor) or process2 != 0.0:
        # sigma_tilde^2 (1 - E^2): -expm1 keeps its digits at short lags; the clamp keeps lag 0 from log(0).
        gained = (-torch.expm1(decay)).clamp_min(torch.finfo(decay.dtype).tiny)
        log_variance = torch.logaddexp(log_variance, _log(process2, lag) + gained.log())
    return log_variance


def _log(value: Scalar, like: Tensor | None = None) -> Tensor:
    dtype = like.dtype if like is not None else torch.float64
    return torch.as_tensor(value, dtype=dtype, device=None if like is None else like.device).log()
