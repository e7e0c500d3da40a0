"""Radial-tangential covariance and its propagation (Section 3.2, Appendix B), and the isotropic one of Appendix A."""

from __future__ import annotations

import torch
from torch import Tensor

from polarlm.geometry.sphere import Field, radial_projector, tangential_projector


def rt_covariance(
    u: Tensor, radial_variance: float | Tensor, tangential_variance: float | Tensor, field: Field = "real"
) -> Tensor:
    """Sigma(u) = sigma_r^2 P_R(u) + sigma_t^2 P_T(u), a matrix (..., D, D) (Eq. rt_measurement_covariance)."""
    return radial_variance * radial_projector(u, field) + tangential_variance * tangential_projector(u, field)


def rt_precision(
    u: Tensor, radial_variance: float | Tensor, tangential_variance: float | Tensor, field: Field = "real"
) -> Tensor:
    """The inverse of `rt_covariance`, in closed form because the two projectors are orthogonal."""
    return rt_covariance(u, 1.0 / radial_variance, 1.0 / tangential_variance, field)


def observation_covariance(covariance: Tensor, observation: Tensor) -> Tensor:
    """R = (C S) Lambda_R (C S)^T: the latent covariance seen through the observation matrix (D', D)."""
    return observation @ covariance @ observation.transpose(-1, -2)


def propagate(covariance: Tensor, transition: Tensor) -> Tensor:
    """T Sigma T^T: the covariance after a linear transition (Prop. 2 has T = gamma * isometry)."""
    return transition @ covariance @ transition.transpose(-1, -2)


def propagated_variance(variance: float | Tensor, mu: float | Tensor, lag: Tensor) -> Tensor:
    """exp(-2*mu*lag) * variance: what propagation does to both RT variances under isotropic contraction."""
    return variance * torch.exp(-2.0 * mu * lag)


def rt_part(covariance: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """The radial and tangential variance of any covariance at u: its average over all isometries that fix u."""
    # Averaging leaves exactly the two invariants of the stabiliser: u's own variance and the trace of the rest.
    radial = torch.einsum("...a,...ab,...b->...", u, covariance, u) / (u * u).sum(-1)
    trace = covariance.diagonal(dim1=-2, dim2=-1).sum(-1)
    return radial, (trace - radial) / (u.shape[-1] - 1)


def lyapunov_covariance(dynamics: Tensor, diffusion: Tensor, lag: float) -> Tensor:
    """V(lag) = integral_0^lag exp(As) Q exp(A^T s) ds, the solution of V' = AV + VA^T + Q with V(0) = 0 (App. A)."""
    # Van Loan: one exponential of [[A, Q], [0, -A^T]] holds exp(A lag) and the integral.
    size = dynamics.shape[-1]
    block = torch.zeros(2 * size, 2 * size, dtype=dynamics.dtype, device=dynamics.device)
    block[:size, :size] = dynamics
    block[:size, size:] = diffusion
    block[size:, size:] = -dynamics.transpose(-1, -2)
    exponential = torch.linalg.matrix_exp(block * lag)
    return exponential[:size, size:] @ exponential[:size, :size].transpose(-1, -2)


def modal_process_variance(lag: Tensor, growth: Tensor, diffusion: Tensor) -> Tensor:
    """lambda_V,k(lag) = lambda_Q,k (1 - exp(2 Re(lambda_k) lag)) / (-2 Re(lambda_k)); lambda_Q,k * lag at Re = 0."""
    exponent = 2.0 * growth * lag
    still = exponent.abs() < 1e-12
    ratio = torch.expm1(exponent) / torch.where(still, torch.ones_like(exponent), exponent)
    return diffusion * lag * torch.where(still, torch.ones_like(exponent), ratio)


def isotropic_variance(
    lag: Tensor,
    mu: float | Tensor,
    process_variance: float | Tensor,
    key_variance: float | Tensor,
    floor_variance: float | Tensor = 0.0,
    query_variance: float | Tensor = 0.0,
) -> Tensor:
    """RFA's scalar kernel sigma^2/(2 mu) (1 - E^2) + eta^2 E^2 + sigma_0^2 [+ gamma^2 for the residual] (App. A)."""
    mu, process_variance = torch.as_tensor(mu, dtype=lag.dtype), torch.as_tensor(process_variance, dtype=lag.dtype)
    accumulated = modal_process_variance(lag, -mu, process_variance)
    return accumulated + propagated_variance(key_variance, mu, lag) + floor_variance + query_variance
